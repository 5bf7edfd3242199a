"""Measure `jaxspec serve` under load: requests a second, time to the first token, time per token.

    jaxspec serve --target smollm2-eyes --draft jaxspec_demo/smollm2_eyes/kv_head \\
        --max-new-tokens 64 --prompt-buckets 64,128,192,256 --prefix-bytes 0 --port 8000
    python -m eval.serving --target smollm2-eyes --draft jaxspec_demo/smollm2_eyes/kv_head

The questions repeat, so a server that keeps prompts would read few of them (`--prefix-bytes`). The
second command asks the first one's server, and then measures the engine on the same requests
without a server, one by one and in a batch; `of offline` is the server's tokens a second over the
engine's, for one client over those of one by one. Another server of OpenAI's interface, such as
`transformers serve`, is asked with `--url`; `--model` is then its name for the model. Nothing else
may run on the machine.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np

from eval.lib.output.report import Run
from eval.lib.output.tables import Record, Table, has, number
from eval.lib.times.load import Timing, ask_all
from jaxspec.cli.options import run_script
from jaxspec.data.images import load_image
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.errors import InputError, reading
from jaxspec.loading.models import LoadedModel, load_draft
from jaxspec_demo import ASSETS

QUESTIONS = (
    "Tell me what you see in the image.",
    "What colour is the tree?",
    "Which word can you read on the sign?",
    "How many things are in the picture?",
)
BATCH = EngineConfig.batch_size
"""Rows of the engine without a server, as of `jaxspec serve`."""
PICTURE = ASSETS / "page.png"


def main(
    out: Path = Path("runs/serving"),
    url: str = "http://127.0.0.1:8000",
    target: str | None = None,
    draft: str | None = None,
    gamma: Literal["auto"] | int = "auto",
    model: str | None = None,
    clients: tuple[int, ...] = (1, 4, 8, 16),
    requests: int = 32,
    new: int = 64,
    images: bool = True,
) -> None:
    """Measure a running server.

    Args:
      out: Directory for results.json and table.md.
      url: The server.
      target: The server's target, for the rows of the engine without a server.
      draft: The server's draft.
      gamma: Drafted tokens per block, as the server's.
      model: Name of the model in requests; by default the first that the server lists.
      clients: Numbers of clients that ask at once.
      requests: Requests of each measurement.
      new: Maximum tokens of an answer.
      images: Send a picture with each second request; without it, all requests are text.
    """
    options = dict(locals())
    if min(clients, default=0) < 1 or min(requests, new) < 1:
        raise InputError(f"clients, requests, new: {clients}, {requests}, {new}; give 1 or more")
    if target is None and (draft is not None or gamma != "auto"):
        raise InputError(
            f"draft {draft}, gamma {gamma}: read only with --target; give it, or leave them out"
        )
    with Run("serving", options, out, "of one run each") as run:
        run.restore()
        name = model or _listed(url)
        bodies = [_body(name, i, new, images) for i in range(requests)]
        # A process of its own, because Python runs one thread at a time.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for count in clients:
                if not has(run.rows, clients=count):
                    pool.apply(ask_all, (url, bodies[:2], 1))
                    run.add([row(count, *pool.apply(ask_all, (url, bodies, count)))])
                run.write(table(run.rows))
        if target is not None:
            loaded = LoadedModel.load(target)
            head = load_draft(draft, loaded) if draft else None
            for batch in (1, BATCH):
                if not has(run.rows, clients=0, batch=batch):
                    engine = Engine(loaded, head, EngineConfig(gamma=gamma, batch_size=batch))
                    questions = [_request(i, new, images) for i in range(requests)]
                    run.add([offline(engine, batch, questions)])
        run.write(table(run.rows))


def _listed(url: str) -> str:
    with (
        reading(f"url {url}: lists no model", "start the server, and give its address"),
        urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer,
    ):
        return json.load(answer)["data"][0]["id"]


def _body(model: str, i: int, new: int, images: bool) -> dict[str, Any]:
    content: Any = QUESTIONS[i % len(QUESTIONS)]
    if images and i % 2 == 0:
        url = f"data:image/png;base64,{b64encode(PICTURE.read_bytes()).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [image, {"type": "text", "text": content}]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": new, "temperature": 0}


def _request(i: int, new: int, images: bool) -> Request:
    pictures = [load_image(PICTURE)] if images and i % 2 == 0 else []
    return Request(QUESTIONS[i % len(QUESTIONS)], new, images=pictures)


def row(clients: int, seconds: float, timings: Sequence[Timing]) -> Record:
    """Return a measurement of a server."""
    each = [(timing.whole - timing.first) / max(timing.tokens - 1, 1) for timing in timings]
    firsts = [timing.first for timing in timings]
    tokens = sum(timing.tokens for timing in timings)
    return {
        "clients": clients,
        "requests_per_second": len(timings) / seconds,
        "tokens_per_second": tokens / seconds,
        **{f"first_ms_p{p}": 1e3 * float(np.percentile(firsts, p)) for p in (50, 95)},
        **{f"token_ms_p{p}": 1e3 * float(np.percentile(each, p)) for p in (50, 95)},
        "tokens": tokens,
    }


def offline(engine: Engine, batch: int, requests: Sequence[Request]) -> Record:
    """Return the measurement of the engine, of no clients; first tokens are lone prefills'."""
    for sample in (requests, requests[:1], requests[1:2]):
        engine.generate(sample)  # compiles
    firsts = [engine.generate([request])[0].prefill_ms for request in requests]
    start = time.perf_counter()
    tokens = sum(len(result.tokens) for result in engine.generate(requests))
    seconds = time.perf_counter() - start
    return {
        "clients": 0,
        "batch": batch,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": tokens / seconds,
        **{f"first_ms_p{p}": float(np.percentile(firsts, p)) for p in (50, 95)},
        "tokens": tokens,
    }


def table(rows: Sequence[Record]) -> Table:
    """Return the measurements as a table."""
    columns = ("first_ms_p50", "first_ms_p95", "token_ms_p50", "token_ms_p95")
    engines = {row["batch"]: row["tokens_per_second"] for row in rows if not row["clients"]}
    cells = [
        [
            str(row["clients"] or f"offline, batch {row['batch']}"),
            *(number(row[name]) for name in ("requests_per_second", "tokens_per_second")),
            *(number(row.get(name), 0) for name in columns),
            number(engine and row["tokens_per_second"] / engine),
        ]
        for row in rows
        for engine in [engines.get(1 if (row["clients"] or row["batch"]) == 1 else BATCH)]
    ]
    header = ["clients", "requests/s", "tokens/s", "first p50", "p95", "token p50", "p95 (ms)"]
    return Table("Load on jaxspec serve", [*header, "of offline"], cells)


if __name__ == "__main__":
    run_script(main, __doc__)
