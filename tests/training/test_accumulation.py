"""A batch that is computed in parts has the loss and the gradient of the whole batch, for each kind
of loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.heads.making import init_head
from jaxspec.models.families import text_params
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.lora import Lora, init_lora
from jaxspec.prompts.views import parse_view
from jaxspec.sharding import make_mesh, on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.head_batches import Anchoring, Blocks, HeadBatch, HeadBatches, draw_anchors
from jaxspec.training.head_loss import make_loss
from jaxspec.training.loop.batches import rows_sharding
from jaxspec.training.loop.step import gradient, partition
from jaxspec.training.losses import BlockLoss, Divergence
from jaxspec.training.objectives import Distillation, tuning_loss
from tests import tiny
from tests.decoding.test_assistant import TEXT
from tests.decoding.test_width import HEADS
from tests.training.test_conversations import MODEL, batches

TEACHER, STUDENT = tiny.random_params(tiny.CONFIG), tiny.random_params(tiny.CONFIG, seed=1)
WORDS = tuple(range(3, 40))
"""Answers have other tokens, too, which a draft with this vocabulary does not learn."""
UPDATES = Lora(rank=2, alpha=4, modules=("q_proj",))
Case = tuple[Any, dict[str, Any], str, Any]
"""Loss, parameters, the name of the frozen ones, and a batch."""


def tuned(rows: int, view: str = "M", words: bool = False, lora: Lora | None = None) -> Case:
    """Return a draft model that learns answers."""
    read, drafts, params = parse_view(view), MODEL.model, STUDENT
    batch = batches(batch=rows, view=read)(1)
    if words:
        drafts, params = tiny.narrow(drafts, params, WORDS)
    if lora:
        params = {**params, "lora": init_lora(lora, params, jax.random.key(0))}
    return tuning_loss(drafts, read, lora=lora), params, "none", batch


def distilled(kind: Divergence, rows: int, top_k: int | None = None, share: float = 1.0) -> Case:
    """Return a draft model that learns a teacher's distributions."""
    batch = batches(batch=rows, teacher=MODEL)(1)
    loss = tuning_loss(
        MODEL.model, teacher=MODEL.model, distillation=Distillation(kind, top_k, share)
    )
    return loss, {**STUDENT, "teacher": TEACHER}, "teacher", batch


def headed(kind: str, loss: BlockLoss, rows: int) -> Case:
    """Return a head with a draft vocabulary."""
    anchoring, text = Anchoring(3, loss), kind == "assistant"
    target = TEXT if text else tiny.CONFIG
    config, params = HEADS[kind](target), tiny.random_params(target)
    if not text:
        config = replace(config, text_config=replace(config.text_config, draft_vocabulary=WORDS))
    heads = {"head": (config, anchoring)}
    batch = talk(rows, anchoring) if text else HeadBatches(batches(batch=rows), heads)(1)
    head = init_head(config, text_params(target, params), jax.random.key(0))
    made = make_loss(LanguageModel(target), heads)
    return made, {"head": head, "target": params}, "target", batch


def talk(rows: int, anchoring: Anchoring) -> HeadBatch:
    """Return rows of text of different lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 20, (rows, 16)).astype(np.int32)
    mask = (np.arange(16) > 4) & (np.arange(16) < rng.integers(7, 16, (rows, 1)))
    numbers = np.arange(rows, dtype=np.uint32)
    prompts = PromptRows(tokens, np.full(rows, 16))  # type: ignore[arg-type]
    whole = ConversationBatch(prompts, mask, {}, numbers)
    draws = (np.random.default_rng(row) for row in range(rows))
    blocks = Blocks(draw_anchors(mask, anchoring.anchors, draws), None)
    return HeadBatch(whole, {"head": blocks})


CASES: dict[str, Callable[[int], Case]] = {
    "MTP tvd": partial(headed, "MTP", "tvd"),
    "KV kl": partial(headed, "KV", "kl"),
    "EAGLE-3 kl": partial(headed, "EAGLE-3", "kl"),
    "DFlash tvd": partial(headed, "DFlash", "tvd"),
    "ViSpec lk_lambda": partial(headed, "ViSpec", "lk_lambda"),
    "one-pass ce": partial(headed, "one-pass", "ce"),
    "assistant kl": partial(headed, "assistant", "kl"),
    "answers": tuned,
    "answers, few words": partial(tuned, view="P1", words=True),
    "answers, updates": partial(tuned, lora=UPDATES),
    "forward_kl": partial(distilled, "forward_kl"),
    "reverse_kl": partial(distilled, "reverse_kl", share=0.5),
    "tvd": partial(distilled, "tvd", top_k=5, share=0.7),
}
"""Each loss, and heads that read their target in each way."""


@pytest.mark.parametrize(
    ("name", "parts", "devices"),
    [
        ("MTP tvd", 4, 1),
        *tiny.rarer(*((name, 4, 1) for name in CASES if name not in ("MTP tvd", "KV kl", "tvd"))),
        *tiny.rarer(("KV kl", 8, 8), ("tvd", 2, 8)),
    ],
)
def test_the_gradient_of_parts_is_that_of_the_batch(name: str, parts: int, devices: int) -> None:
    rows = 8 * devices
    loss, params, frozen, batch = CASES[name](rows)
    split = partition(params, (frozen,) if frozen in params else ())
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    placed = jax.device_put(batch, rows_sharding(mesh))

    def result(parts: int) -> Any:
        config = TrainConfig(steps=1, batch=rows, accumulate=parts)
        with on_mesh(mesh):
            return jax.jit(partial(gradient, loss, config))(*split, placed)

    whole, metrics = result(1)
    largest = max(float(np.abs(leaf).max()) for leaf in whole.values())
    assert largest > 1e-3
    grads, others = result(parts)
    for path, leaf in whole.items():
        within = 1e-5 * np.abs(leaf).max() + 1e-7 * largest
        np.testing.assert_allclose(grads[path], leaf, atol=within, err_msg=path)
    assert {metric: float(value) for metric, value in others.items()} == pytest.approx(
        {metric: float(value) for metric, value in metrics.items()}, rel=1e-5
    )
