"""Batches and losses of a recipe and seed are what they have always been: a run may be repeated
years later.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.making import init_head
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.prompts.views import parse_view
from jaxspec.training.conversations import ConversationBatches
from jaxspec.training.head_batches import Anchoring, HeadBatches
from jaxspec.training.head_loss import make_loss
from jaxspec.training.objectives import Distillation, tuning_loss
from tests import tiny
from tests.tiny import Talk
from tests.training.test_conversations import ENCODER, MODEL

TEXT = LoadedModel(tiny.CONFIG.text_config, {}, MODEL.tokenizer, None)
TEACHER, STUDENT = tiny.random_params(tiny.CONFIG), tiny.random_params(tiny.CONFIG, seed=1)


def batches(view: str, **fields: Any) -> ConversationBatches:
    model = TEXT if view == "T" else MODEL
    return ConversationBatches(
        Talk(), ENCODER, model, 4, (64, 96), (0, 2), parse_view(view), **fields
    )


def checksum(batch: Any) -> int:
    """Return a sum of all that is whole numbers: pixels differ in the last bit from one
    transformers to the next.
    """
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return zlib.crc32(b"".join(leaf.tobytes() for leaf in found if leaf.dtype.kind != "f"))


@pytest.mark.parametrize(
    ("view", "fields", "sums"),
    [
        ("M", {}, (1874526353, 480123351)),
        ("T", {"teacher": MODEL}, (2457854002, 493709904)),
        ("P1", {"teacher": MODEL, "seed": 3}, (1809698915, 1600044989)),
        ("M", {"plain": True}, (3117734998, 533533492)),
        ("M", {"process": (1, 2)}, (3032570535, 1939364926)),
    ],
)
def test_batches(view: str, fields: dict[str, Any], sums: tuple[int, ...]) -> None:
    made = batches(view, **fields)
    assert tuple(checksum(made(step).replace(answers=None)) for step in (0, 9)) == sums


@pytest.mark.parametrize(
    ("view", "distillation", "loss"),
    [
        ("M", None, 5.519123),
        ("P1", Distillation("forward_kl"), 1.137585),
        ("M", Distillation("tvd", top_k=5, share=0.7), 1.813142),
    ],
)
def test_losses(view: str, distillation: Distillation | None, loss: float) -> None:
    teacher = MODEL if distillation else None
    loss_fn = tuning_loss(
        MODEL.model, parse_view(view), teacher=teacher and teacher.model, distillation=distillation
    )
    found, _ = jax.jit(loss_fn)(STUDENT | {"teacher": TEACHER}, batches(view, teacher=teacher)(1))
    assert float(found) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(("loss", "value"), [("kl", 1.008160), ("ce", 5.129524)])
def test_kv_heads(loss: Any, value: float) -> None:
    config, anchoring = KVHeadConfig.of_target(tiny.CONFIG, image_slots=1), Anchoring(3, loss)
    heads = {"head": (config, anchoring)}
    batch = HeadBatches(batches("M"), heads, seed=5)(1)
    bare = batch.replace(conversations=batch.conversations.replace(answers=None))
    assert checksum(bare) == 3738433117
    head = init_head(config, text_params(tiny.CONFIG, TEACHER), jax.random.key(0))
    found, _ = jax.jit(make_loss(MODEL.model, heads))({"head": head, "target": TEACHER}, batch)
    assert float(found) == pytest.approx(value, rel=1e-4)
