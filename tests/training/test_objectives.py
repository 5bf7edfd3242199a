"""Training scores a draft's view next to its teacher's own, slot by slot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.views import parse_views
from jaxspec.training.conversations import ConversationBatches
from jaxspec.training.objectives import Distillation, teacher_logits, teacher_params, tuning_loss
from tests import tiny
from tests.tiny import Talk
from tests.training.test_conversations import ENCODER, MODEL

TEXT = LoadedModel(tiny.CONFIG.text_config, {}, MODEL.tokenizer, None)
TEACHER = tiny.random_params(tiny.CONFIG)


def batch(view: str = "M", teacher: LoadedModel | None = MODEL, model: LoadedModel = MODEL) -> Any:
    made = ConversationBatches(
        Talk(),
        ENCODER,
        model,
        4,
        (96,),
        tile_buckets=(2,),
        view=parse_views((view,))[0],
        teacher=teacher,
    )
    return made(0)


@pytest.mark.parametrize(("name", "view"), [("text", "T"), ("lvlm", "P1")])
def test_a_teacher_is_read_where_the_draft_predicts(name: str, view: str) -> None:
    made = batch(view, model=MODEL if name == "lvlm" else TEXT)
    images = made.images if made.teacher.images is None else made.teacher.images
    run = jax.jit(partial(tiny.full_pass, MODEL.model))
    whole = run(TEACHER, made.teacher.rows.tokens, images["pixels"])
    taught = jax.jit(lambda made: teacher_logits(MODEL.model, TEACHER, made, None))(made)
    longer = made.teacher.rows.length - made.rows.length
    assert longer.max() > 0
    for row, place in np.argwhere(made.mask):
        there = place + longer[row]  # all images stand before the first answer
        assert made.teacher.rows.tokens[row, there] == made.tokens[row, place]
        np.testing.assert_allclose(
            taught[row, place - 1], whole[row, there - 1], rtol=1e-4, atol=1e-4
        )
    assert (made.teacher.images is not None) == (name == "text")


def test_the_teacher_itself_has_nothing_to_learn_and_shares_its_images() -> None:
    made = batch()
    loss_fn = tuning_loss(MODEL.model, teacher=MODEL.model, distillation=Distillation("reverse_kl"))
    loss, metrics = jax.jit(loss_fn)(TEACHER | {"teacher": TEACHER}, made)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    assert float(metrics["acceptance"]) == pytest.approx(1, abs=1e-5)
    # all agree: full blocks but for the last of an answer
    assert float(metrics["tokens_per_pass"]) > 4
    assert made.teacher.images is None


def test_a_tower_that_both_see_through_runs_once() -> None:
    """A tower that both models see through runs once, for the same loss and gradient; a tower that
    trains, that differs, or that the draft is not shown, is not shared.
    """
    student = tiny.random_params(tiny.CONFIG, seed=1)
    view, frozen = parse_views(("P1",))[0], ("vision_tower",)
    teacher, other = replace(MODEL, params=TEACHER), replace(MODEL, params=student)
    draft = replace(MODEL, params=student | {"vision_tower": TEACHER["vision_tower"]})
    for pair in (
        (draft, view, ("language_model",)),
        (other, view, frozen),
        (draft, parse_views(("T",))[0], frozen),
    ):
        assert teacher_params(teacher, *pair) is TEACHER
    less = teacher_params(teacher, draft, view, frozen)
    assert less.keys() == TEACHER.keys() - {"vision_tower"}
    made = batch("P1")
    loss_fn = tuning_loss(MODEL.model, view, teacher=MODEL.model, distillation=Distillation())
    rest = {name: part for name, part in student.items() if name != "vision_tower"}
    towers, found = [], []
    for held in (TEACHER, less):
        still = {"teacher": held, "vision_tower": TEACHER["vision_tower"]}
        step = jax.jit(jax.value_and_grad(lambda own, still: loss_fn(own | still, made)[0])).lower(
            rest, still
        )
        towers.append(step.as_text().count("stablehlo.convolution"))
        found.append(step.compile()(rest, still))
    assert towers[0] == 2 * towers[1] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *found)
