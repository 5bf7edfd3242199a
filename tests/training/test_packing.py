"""Rows that hold several conversations teach what rows of one do, and leave few slots empty."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.heads.making import init_head
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.models.families import text_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.prompts.views import parse_view
from jaxspec.training import conversations
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.conversations import GROUP, ConversationBatch, ConversationBatches
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.head_batches import Anchoring, HeadBatches
from jaxspec.training.head_loss import make_loss
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.loop.step import gradient, partition
from jaxspec.training.losses import Loss
from jaxspec.training.objectives import Distillation, tuning_loss
from jaxspec.training.recipes import Stage, stage_data
from tests import tiny
from tests.decoding.test_assistant import TEXT
from tests.decoding.test_width import HEADS
from tests.tiny import Talk
from tests.tiny.families import FAMILIES, SQUARES
from tests.tiny.training import train_head
from tests.training.test_conversations import joined, same

LENGTHS = {"buckets": (96, 160), "tile_buckets": (0, 2, 4, 16)}
STEP = 3


def loaded(family: str) -> LoadedModel:
    if family == "llava":
        return tiny.loaded({})
    config, processor = (FAMILIES | SQUARES)[family]()
    return LoadedModel(config, {}, tiny.chat_tokenizer(), processor)


class Texts(Talk):
    """Give the conversations of `Talk` without images."""

    def __getitem__(self, i: Any) -> Sample:
        return super().__getitem__(3 * i)


def packed(model: LoadedModel, view: str = "M", **fields: Any) -> ConversationBatches:
    reader = loaded("llava") if view == "T" and model.config is not TEXT else model
    encoder = prompt_encoder(fields.get("teacher") or reader)
    samples = fields.pop("samples", Talk())
    return ConversationBatches(
        samples, encoder, model, 4, view=parse_view(view), packing=True, **(LENGTHS | fields)
    )


def apart(rows: ConversationBatches, monkeypatch: pytest.MonkeyPatch) -> ConversationBatches:
    """Return batches of a step's conversations, each in a row of its own."""
    talks = [(talk,) for row in rows._rows(STEP)[0] for talk in row]
    assert len(talks) > rows.rows
    monkeypatch.setattr(conversations, "_group", lambda *_: GROUP * talks)
    return replace(rows, packing=False, batch=len(talks))


def check(loss: Loss, params: Any, frozen: tuple[str, ...], *batches: Any) -> None:
    """Compare the gradients and metrics of batches."""

    def result(batch: Any) -> Any:
        rows = len(jax.tree.leaves(batch)[0])
        config = TrainConfig(steps=1, batch=rows)
        return jax.jit(partial(gradient, loss, config))(*partition(params, frozen), batch)

    (ours, metrics), (theirs, others) = map(result, batches)
    largest = max(float(np.abs(leaf).max()) for leaf in theirs.values())
    assert largest > 1e-3
    for path, leaf in theirs.items():
        within = 1e-4 * np.abs(leaf).max() + 1e-6 * largest
        np.testing.assert_allclose(ours[path], leaf, atol=within, err_msg=path)
    shares = [float(each.pop("filled")) for each in (metrics, others)]
    assert 0 < shares[1] <= 1
    assert (
        shares[0] == pytest.approx(batches[0].rows.length.sum() / batches[0].tokens.size)
        if (isinstance(batches[0], ConversationBatch))
        else shares[0] > 0
    )
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: float(value) for name, value in others.items()}, rel=1e-4
    )


@pytest.mark.parametrize(
    ("family", "view", "taught"),
    [
        ("llava", "M", False),
        *tiny.rarer(
            ("llava", "T", True),
            ("llava", "M", True),
            ("llava", "P1", False),
            ("llava_onevision", "M", False),
            ("qwen2_5_vl", "M", False),
            ("qwen3_vl", "M", True),
            ("gemma4", "M", False),
            ("opt", "T", False),
        ),
    ],
)
def test_a_draft_learns_the_same_of_packed_rows(
    family: str, view: str, taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft learns the same of packed rows: positions, images, windows and the teacher's rows of
    each conversation stay its own.
    """
    model = loaded(family)
    teacher = model if taught else None
    if view == "T" and family == "llava":
        model = replace(model, config=tiny.CONFIG.text_config, image_processor=None)
    rows = packed(model, view, teacher=teacher)
    params: Any = tiny.random_params(model.config)
    more: dict[str, Any] = {}
    if teacher:
        params = {**params, "teacher": tiny.random_params(teacher.config, seed=1)}
        more = {"teacher": teacher.model, "distillation": Distillation("forward_kl", share=0.5)}
    loss = tuning_loss(model.model, parse_view(view), **more)
    batch = rows(STEP)
    frozen = ("teacher",) if teacher else ()
    check(loss, params, frozen, batch, apart(rows, monkeypatch)(STEP))


@pytest.mark.parametrize(
    "kind", ["KV", *tiny.rarer(*(kind for kind in HEADS if kind not in ("KV", "ViSpec")))]
)
def test_a_head_learns_the_same_of_packed_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.loaded({})
    if kind == "assistant":
        model = LoadedModel(TEXT, {}, tiny.chat_tokenizer(), None)
    config, params = HEADS[kind](model.config), tiny.random_params(model.config)
    rows = packed(model, "T", samples=Texts()) if kind == "assistant" else packed(model)
    heads = {"head": (config, Anchoring(3))}
    batch = HeadBatches(rows, heads)(STEP)
    packed_anchors = batch.blocks["head"].anchors
    assert (packed_anchors >= 0).sum() > 3 * rows.rows
    prompts = batch.conversations.rows
    alone = apart(rows, monkeypatch)
    theirs = HeadBatches(alone, heads)(STEP)
    anchors = np.full((alone.batch, packed_anchors.shape[1]), -1, np.int32)
    number = -1
    for row, starts, length in zip(packed_anchors, prompts.first, prompts.length, strict=True):
        for start in np.unique(starts[:length]):
            number += 1
            own = row[(row >= 0) & (starts[row] == start)]
            anchors[number, : len(own)] = own - start
    assert number == alone.batch - 1
    head = init_head(config, text_params(model.config, params), jax.random.key(0))
    loss = make_loss(LanguageModel(model.config), heads)
    blocks = {"head": theirs.blocks["head"].replace(anchors=anchors)}
    check(loss, {"head": head, "target": params}, ("target",), batch, theirs.replace(blocks=blocks))


class Mixture(Talk):
    """Give samples with lengths as in LLaVA's mixture of 665k: images of 576 slots and turns about
    them; texts.
    """

    def __getitem__(self, i: Any) -> Sample:
        rng = np.random.default_rng(i)
        image, longest = rng.random() < 0.94, 2000
        count = rng.gamma(1.5, 130) if image else rng.lognormal(6.7, 0.8)
        answer = "a" * int(min(30 + count, longest - 600 * image))
        images = (tiny.page(0),) if image else ()
        return Sample(str(i), "mixture", images, ((PLACEHOLDER * image + "What?", answer),))


@pytest.mark.parametrize("batch", [16, 64])
def test_nine_tenths_of_the_slots_are_filled(batch: int) -> None:
    """Packing fills nine tenths of the slots; each conversation is in one row of its group, and a
    row shows few more images than others.
    """
    vision = replace(tiny.CONFIG.vision_config, image_size=336)
    model = tiny.loaded({}, replace(tiny.CONFIG, vision_config=vision))
    buckets = (640, 768, 1024, 1536, 2048)
    rows = ConversationBatches(
        Mixture(), prompt_encoder(model), model, batch, buckets, (0, 1, 2), packing=True
    )
    shares = []
    for each in (rows, replace(rows, packing=False)):
        tokens, slots = zip(*(each.filled(step) for step in range(GROUP)), strict=True)
        shares.append(sum(tokens) / sum(slots))
    assert shares[0] >= 0.9 > shares[1]
    _, made = rows._rows(0)
    talks = [talk for row in made for talk in row]
    assert len(talks) == len({id(talk) for talk in talks}) == GROUP * batch
    tiles = [sum(talk.forms[0].tiles for talk in row) for row in made]
    assert max(tiles) <= 1.5 * np.mean(tiles)


def test_processes_share_packed_rows() -> None:
    model = tiny.loaded({})
    whole, *parts = (packed(model, process=process) for process in ((0, 1), (0, 2), (1, 2)))
    for step in range(2):
        same(whole(step), joined(*(part(step) for part in parts)))


def test_a_trial_of_few_samples_fits_its_mesh(taught: Path) -> None:
    """A trial of few samples fits its mesh: packed, four samples would fill fewer rows than two
    devices compute in two parts.
    """
    train = TrainConfig(steps=9, batch=8, accumulate=2, packing=True, mesh=MeshConfig(data=2))
    stage = Stage("tune", train.shortened(), (("talk", 1.0),))
    target = LoadedModel.load(taught / "target")
    path = str(taught / "target")
    recipe = Recipe(target=path, start=path, stages=(stage,), buckets=(96,))
    batches, _ = stage_data(recipe, stage, {"talk": Talk()}, target, target)
    assert batches.rows == 4
    # A trial has the mesh of the whole run: several processes must use all of their devices.
    every = TrainConfig(steps=9, batch=16, accumulate=2).shortened()
    assert every.batch == 16
    assert every.make_mesh().size == jax.device_count()


def test_what_cannot_learn_from_packed_rows_is_told(taught: Path, tmp_path: Path) -> None:
    train = TrainConfig(steps=1, batch=4, packing=True, mesh=MeshConfig(data=4))
    recipe = HeadRecipe(
        target=str(taught / "target"),
        head={"feature": "fused", "target_layers": (0, 1, 2)},
        stages=(Stage("learn", train, (("talk", 1.0),)),),
        anchoring=Anchoring(2),
        buckets=(96,),
    )
    with pytest.raises(InputError, match=r"keep_readings: packed .* give --learn.no-packing"):
        replace(recipe, keep_readings="kept")
    with pytest.raises(InputError, match=r"learn.packing: 4 samples fill \d rows.* over 4 devices"):
        train_head(recipe, tmp_path, {"talk": taught / "talk"})
