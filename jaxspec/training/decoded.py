"""Evaluate a head by decoding with it, and keep the best one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from jaxspec.data.samples import Sample
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.engine.metrics import acceptance_metrics
from jaxspec.errors import InputError
from jaxspec.files import logged
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.loading import save_head
from jaxspec.loading.models import LoadedHead, LoadedModel
from jaxspec.typing import Params

PROMPTS = 8
"""Questions of a held-out data set that are answered, the first ones that fit the buckets."""
NEW_TOKENS = 64
MEASURE = "decoded_tokens_per_pass"


def decoded(
    target: LoadedModel,
    name: str,
    config: HeadConfig,
    samples: Sequence[Sample],
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    folder: Path,
) -> Callable[[Params], dict[str, float]]:
    """Return a function that decodes greedy answers with a head's parameters.

    It returns their tokens per pass, and the share of them that equal plain decoding's.

    The head is written to FOLDER/newest; the one with the most tokens per pass so far, which
    FOLDER/metrics.jsonl knows after a stop, to FOLDER/best.

    Args:
      name: Name of the head among the parameters.
      lengths: Buckets of prompts, and of image tiles.
      folder: Folder of the stage.
    """
    options = EngineConfig(
        gamma=config.gamma,
        batch_size=PROMPTS,
        prompt_buckets=lengths[0],
        image_buckets=lengths[1],
        new_buckets=(NEW_TOKENS,),
        generation_config="ignore",
    )

    engine, requests = Engine(target, config=options), []
    for sample in samples:
        request = Request(engine.encoder.prompt(sample.question(0)), NEW_TOKENS)
        with suppress(InputError):  # longer than the buckets
            engine.check(request)
            requests.append(request)
        if len(requests) == PROMPTS:
            break
    if not requests:
        raise InputError("held_out: no question fits the buckets; give shorter ones")

    @cache
    def answered() -> list[tuple[int, ...]]:
        """Return plain decoding's answers."""
        return [result.tokens for result in engine.generate(requests)]

    def evaluate(params: Params) -> dict[str, float]:
        plain = answered()
        save_head(folder / "newest", config, params[name], None, overwrite=True)
        draft = LoadedHead.load(folder / "newest", target)
        results = Engine(target, draft, options).generate(requests)
        tokens = acceptance_metrics([result.stats for result in results])["tokens_per_pass"] or 0.0
        earlier = (line.get(MEASURE, 0.0) for line in logged(folder / "metrics.jsonl"))
        if tokens > max(earlier, default=0.0):
            save_head(folder / "best", config, params[name], None, overwrite=True)
        same = [result.tokens == answer for result, answer in zip(results, plain, strict=True)]
        return {MEASURE: tokens, "identical": sum(same) / len(same)}

    return evaluate
