"""Serve the tiny pair on a socket of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import uvicorn
from openai import OpenAI

from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.serve.app import Server, ServerSettings, web_server
from jaxspec.serve.examples import examples
from jaxspec.serve.messages import Limits
from jaxspec.serve.metrics import Metrics
from jaxspec.serve.worker import Worker

MODEL = "tiny"
NEW = 32
CONFIG = EngineConfig(
    views=("M", "T", "lookup"),
    gamma=3,
    batch_size=2,
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
    """Hold a running server, its engine, and one that answers as if alone."""

    engine: Engine
    alone: Engine
    """Pads all prompts to one size."""
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
    limits = Limits(MODEL, images=1, pixels=100_000, tokens=256, races=True, body=BODY)
    settings = ServerSettings(limits, hosts=("127.0.0.1", "localhost", "[::1]"))
    server = Server(worker, settings, metrics)
    web = web_server(server)
    worker.start()
    threading.Thread(target=web.run, args=([listener],), daemon=True).start()
    one_size = replace(CONFIG, prompt_buckets=CONFIG.prompt_buckets[-1:])
    alone = Engine(engine.target, engine.draft, one_size)
    return Served(engine, alone, worker, server, web, listener.getsockname()[1])


@pytest.fixture(scope="session")
def served(target: LoadedModel, draft: LoadedModel) -> Iterator[Served]:
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
