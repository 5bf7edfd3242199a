"""Training batches mark answers in their mask, show views, are shared by processes, and go on where
they stopped.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlavaNextImageProcessorPil

from jaxspec.config import LlavaNextConfig
from jaxspec.data.prepared import mixture
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.models.inputs import TEXT
from jaxspec.prompts.messages import dialogue
from jaxspec.prompts.views import parse_views
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.conversations import GROUP, ConversationBatch, ConversationBatches
from jaxspec.training.loop import reading
from jaxspec.training.loop.reading import CountedBatches
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import mean_of_rows
from tests import tiny
from tests.tiny import Talk

MODEL = tiny.loaded({})
ENCODER = prompt_encoder(MODEL)
PAGE = tiny.CONFIG.image_tokens
IMAGE = tiny.CONFIG.image_token_index


def batches(**fields: Any) -> ConversationBatches:
    given: dict[str, Any] = {
        "model": MODEL,
        "batch": 4,
        "buckets": (64, 96),
        "tile_buckets": (2,),
    } | fields
    return ConversationBatches(given.pop("samples", Talk()), ENCODER, **given)


def told(batch: ConversationBatch, row: int) -> str:
    return tiny.tokenizer().decode(batch.tokens[row][batch.mask[row]])


def same(ours: Any, theirs: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def joined(*parts: Any) -> Any:
    """Return the batch that processes have made part by part."""
    return jax.tree.map(lambda *values: np.concatenate(values), *parts)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] + ' ' if m['role'] == 'system' else"
        " 'USER: ' + m['content'] + ' ASSISTANT:' }}{% endfor %}",
    ],
)
def test_a_system_prompt_is_written_once_before_a_conversation_and_never_before_plain_text(
    template: str | None,
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    encoder = replace(ENCODER, tokenizer=tokenizer)
    said = dialogue((("Is it?", "It is."), ("And?", "No.")))
    text = dialogue((("", "It is."),))
    (with_system, _), (plain, _) = replace(encoder, system="Be kind.").dialogues([said, text])
    (bare, _) = encoder.dialogues([said])[0]
    assert tokenizer.decode(with_system) == tokenizer.decode(bare).replace(
        "USER:", "Be kind. USER:", 1
    )
    np.testing.assert_array_equal(plain, encoder.dialogues([text])[0][0])


def test_the_mask_marks_what_the_assistant_wrote() -> None:
    seen = []
    for step in range(GROUP):
        batch = batches()(step)
        assert batch.tokens.shape[1] in (64, 96)
        for row in range(4):
            words = told(batch, row)
            number = int(words.split()[2].removesuffix("</s>No.</s>"))
            assert words == f"It is {number}" + " so" * (number % 5) + "</s>No.</s>"
            images = number % 3
            assert (batch.tokens[row] == IMAGE).sum() == images * PAGE
            np.testing.assert_array_equal(
                (batch.rows.sources[row, :, 0] >= 0), batch.tokens[row] == IMAGE
            )
            assert (batch.images["pixels"][row, images:] == 0).all()
            np.testing.assert_allclose(  # of the row's own shade, as the processor normalises it
                batch.images["pixels"][row, :images, 0, 0, 0],
                (number / 255 - 0.48145466) / 0.26862954,
                rtol=1e-5,
            )
            seen.append(number)
    assert sorted(seen) == list(range(4 * GROUP))  # a group has each of its samples once,
    assert seen != sorted(seen)  # mixed by length


def test_tiles_belong_to_their_image() -> None:
    """Each image's slots begin with its base tile, whose features follow those of the images
    before.
    """
    sides = ((28, 56), (56, 28), (56, 56))
    config = LlavaNextConfig(
        tiny.CONFIG.text_config,
        tiny.CONFIG.vision_config,
        image_token_index=IMAGE,
        image_grid_pinpoints=sides,
    )
    square = {"height": 28, "width": 28}
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size=square,
        image_grid_pinpoints=[list(side) for side in sides],
    )
    model = LoadedModel(config, {}, tiny.tokenizer(), processor)
    made = ConversationBatches(
        Talk(), ENCODER, model, batch=4, buckets=(96, 128), tile_buckets=(6,)
    )
    most = set()
    for step in range(GROUP):
        batch = made(step)
        for sources, length, row in zip(
            batch.rows.sources[..., 0], batch.rows.length, made.slot_images(step), strict=True
        ):
            sources = sources[:length]
            np.testing.assert_array_equal(row >= 0, sources != TEXT)
            for image in range(row.max() + 1):
                # a base tile and two of the grid
                first, own = 3 * PAGE * image, sources[row == image]
                np.testing.assert_array_equal(own[:PAGE], first + np.arange(PAGE))
                assert own.max() < first + 3 * PAGE
            most.add(row.max())
    assert most == {-1, 0, 1}


@pytest.mark.parametrize(("view", "slots"), [("T", 1), ("T-slots", PAGE), ("P1", 1), ("P", 1)])
def test_views_show_images_as_drafting_does(view: str, slots: int) -> None:
    made, whole = (
        [
            batches(view=parse_views((name,))[0], tile_buckets=(0, 2), target_images=MODEL.images)(
                step
            )
            for step in range(GROUP)
        ]
        for name in (view, "M")
    )
    answers, expected = (
        [told(batch, row) for batch in part for row in range(4)] for part in (made, whole)
    )
    assert sorted(answers) == sorted(expected)
    lengths = [sum(batch.rows.length.sum() for batch in part) for part in (made, whole)]
    images = sum((batch.tokens == IMAGE).sum() for batch in whole) // PAGE
    assert lengths[0] == lengths[1] - images * (PAGE - slots)
    assert any("pixels" in batch.images for batch in made) == (view[0] != "T")
    if view == "T-slots":  # the target's rows, without features
        for one, other in zip(made, whole, strict=True):
            same(one.tokens, other.tokens)
            assert one.rows.sources is None


def test_plain_rows_are_images_and_what_is_said_of_them() -> None:
    batch = batches(plain=True)(0)
    for row in range(4):
        tokens = batch.tokens[row][: batch.rows.length[row]]
        images = (tokens == IMAGE).sum()
        assert tokens[0] == 1  # BOS
        assert batch.mask[row].sum() == len(tokens) - images - 1
        assert told(batch, row).endswith("</s>")
        assert "No." not in told(batch, row)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "fields", [{"buckets": (24,)}, {"tile_buckets": (1,)}], ids=["cut", "tiles"]
)
def test_rows_that_teach_nothing_are_left_out(batch: int, fields: dict[str, Any]) -> None:
    """Rows that teach nothing are left out: other rows of their group take their places, so that
    every row of every batch teaches.
    """
    made = batches(batch=batch, **fields)
    steps = range(3 * GROUP)
    lost = sum(made.unlearned(step) for step in steps)
    assert all(made(step).mask.any(axis=1).all() for step in steps)
    assert 0 < lost < 3 * GROUP * batch
    if "tile_buckets" in fields:
        assert lost == GROUP * batch  # every third sample has two images
        assert max((made(step).tokens == IMAGE).sum(axis=1).max() for step in steps) == PAGE


def test_a_group_in_which_nothing_teaches_takes_rows_of_the_next() -> None:
    long = 2 * GROUP * [replace(Talk()[0], turns=(("Long?" * 20, "No."),))]
    made = batches(samples=[*long, *(Talk()[i] for i in range(GROUP))], batch=1, buckets=(64,))
    assert [made.unlearned(step) for step in range(3 * GROUP)] == [1] * 2 * GROUP + [0] * GROUP
    assert {told(made(step), 0) for step in range(GROUP)} == {
        told(made(step), 0) for step in range(2 * GROUP, 3 * GROUP)
    }


def test_a_row_with_images_for_a_text_target_is_one_line() -> None:
    model = LoadedModel(tiny.CONFIG.text_config, {}, MODEL.tokenizer, None)
    made = ConversationBatches(Talk(), prompt_encoder(model), model, 4, (64,))
    line = "prompt 'What\\?': the target is a text model; give no image"
    with pytest.raises(InputError, match=line):
        made(0)


def test_rows_of_which_none_teaches_end_the_run() -> None:
    with pytest.raises(InputError, match=r"512 rows in turn.*within 8 tokens.*give longer --bucke"):
        batches(buckets=(8,))(0)


def test_too_many_rows_that_teach_nothing_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too many rows that teach nothing end the run, but not before there are enough to tell, and
    not where as many are allowed, of which chance may gather some.
    """
    rows = [Talk()[i] for i in range(20)]
    rows[7] = replace(rows[7], turns=(("Long?" * 20, "No."),), images=())
    monkeypatch.setattr(reading, "SURE", 40)
    one = batches(samples=mixture([(rows, 1.0)], 0), batch=1, buckets=(64,))
    allowed = CountedBatches(one, 120, limit=0.05)
    assert all(map(allowed, range(120)))
    allowed.close()
    capsys.readouterr()
    half = [row if i % 2 else rows[7] for i, row in enumerate(rows)]
    cut = batches(samples=mixture([(half, 1.0)], 0), buckets=(64,))
    made = CountedBatches(cut, 2 * GROUP, limit=0.02)
    for step in range(40 // 4 - 1):
        made(step)
    with pytest.raises(
        InputError,
        match=r"taught nothing.*give longer --buckets.*or let more than 2% be with --unl",
    ):
        made(40 // 4 - 1)
    made.close()
    assert capsys.readouterr().err == ""  # the error is reported once


def test_a_run_that_ended_because_of_rows_that_teach_nothing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ended because of rows that teach nothing goes on, with more of them allowed, from
    the newest checkpoint, to the parameters of a run that never ended.
    """

    @mean_of_rows
    def loss(params: Any, batch: ConversationBatch) -> Any:
        value = jnp.mean((batch.mask.mean(1) * params["scale"] - 1) ** 2)
        return value, {"loss": value}

    monkeypatch.setattr(reading, "SURE", 20)
    rows = [Talk()[0], replace(Talk()[0], turns=(("Long?" * 20, "No."),))]
    made = batches(samples=mixture([(rows, 1.0)], 0), buckets=(64,))
    steps = TrainConfig(steps=8, batch=4, warmup=0, save_every=2, mesh=MeshConfig(data=1))
    start = {"scale": np.zeros(1, np.float32)}
    straight = fit(steps, start, loss, CountedBatches(made, 8), tmp_path / "straight")
    with (
        pytest.raises(InputError, match="taught nothing"),
        closing(CountedBatches(made, 8, limit=0.02)) as few,
    ):
        fit(steps, start, loss, few, tmp_path / "cut")
    assert "taught nothing" not in capsys.readouterr().err  # the error says it
    saved = [int(path.name) for path in (tmp_path / "cut" / "checkpoints").iterdir()]
    assert 0 < max(saved) < 8
    read = CountedBatches(made, 8, limit=0.6)
    ended = fit(steps, start, loss, read, tmp_path / "cut")
    np.testing.assert_array_equal(ended["scale"], straight["scale"])
    assert read._read == 4 * (8 - max(saved))


@pytest.mark.parametrize("packing", [False, True])
def test_batches_that_are_made_ahead_are_those_of_their_steps(packing: bool) -> None:
    """Batches that are made ahead are those of their steps, also those that a later run begins
    with.
    """
    made = partial(batches, packing=packing)
    straight = [made()(step) for step in range(20)]
    for steps in (range(11), range(11, 20)):
        ahead = CountedBatches(made(), 20)
        for step in steps:
            same(ahead(step), straight[step])
        ahead.close()
