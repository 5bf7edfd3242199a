"""A server of the tiny pair on a socket of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from openai import OpenAI

from jaxspec.engine.engine import Engine, EngineConfig
from jaxspec.serve.app import Server, Settings, web_server
from jaxspec.serve.examples import examples
from jaxspec.serve.limits import Limits
from jaxspec.serve.metrics import Metrics
from jaxspec.serve.worker import Worker
from tests import tiny

MODEL = "tiny"
NEW = 32
CONFIG = EngineConfig(
    views=("M", "T", "lookup"),
    gamma=3,
    batch_size=4,
    prompt_buckets=(64, 256),
    image_buckets=(0, 1),
    new_buckets=(NEW,),
    trace=True,
)
QUEUE, BODY = 60, 200_000
SIZES = (64, 256), 1, 28, NEW
"""Sizes that the server has programs for, see `examples`."""


@dataclass
class Served:
    """A running server, and its engine."""

    engine: Engine
    worker: Worker
    server: Server
    web: uvicorn.Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


def start(engine: Engine, plain: Engine) -> Served:
    """Return a server, not yet warm."""
    listener = socket.create_server(("127.0.0.1", 0))
    metrics = Metrics(MODEL)
    requests = examples(engine, *SIZES)
    worker = Worker(engine, requests, QUEUE, plain, metrics.observe, prefixes=2**24)
    limits = Limits(MODEL, images=1, pixels=100_000, tokens=256, races=True)
    settings = Settings(limits, body=BODY, hosts=("127.0.0.1", "localhost", "[::1]"))
    server = Server(worker, settings, metrics)
    web = web_server(server)
    worker.start()
    threading.Thread(target=web.run, args=([listener],), daemon=True).start()
    return Served(engine, worker, server, web, listener.getsockname()[1])


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    params = tiny.random_params(tiny.CONFIG)
    target = tiny.loaded(params)
    draft = tiny.loaded(tiny.noisy(params, 0.1) | {"vision_tower": params["vision_tower"]})
    running = start(
        Engine(target, draft, CONFIG), Engine(target, config=EngineConfig(batch_size=1))
    )
    assert running.worker.ready.wait(600)
    while not running.web.started:
        time.sleep(0.01)
    yield running
    running.web.should_exit = True
    running.worker.end()
    running.worker.join(60)
    assert running.worker.failure is None
