"""Comparisons of trained heads, and of trainers, run what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec.errors import InputError
from jaxspec.heads.making import new_head
from tests import tiny
from tests.hub.pages import PARSERS
from train.alike import HEADS, commands
from train.steps import SHAPES, compiled, our_step, specjax_step, timed

pytestmark = pytest.mark.full

SMALL = replace(
    SHAPES["small"],
    target=replace(tiny.CONFIG.text_config, num_hidden_layers=8),
    vocabulary=16,
    batch=2,
    length=12,
    gamma=3,
)


def test_heads_that_are_trained_alike_differ_in_their_kind() -> None:
    """Heads that are trained alike differ only in their kind: each command is one that its script
    reads, and its head is of the kind in its name.
    """
    answers, *training, table = (
        PARSERS[words[0]](words[1:]) for words in commands(150, 256, 16, Path("my runs/alike"))
    )
    (first,) = training[0][0].values()
    for name, (recipes, options) in zip(HEADS, training, strict=True):
        (recipe,) = recipes.values()
        head = new_head(replace(SMALL.target, num_hidden_layers=30), **recipe.head)
        kind, _, rule = name.partition(", ")
        assert head.title == (f"{kind} head" if rule or kind == "DFlash" else kind)
        assert getattr(head, "images", "") == rule
        assert head.text_config.num_hidden_layers == 1
        same = replace(first, head=recipe.head, chosen=recipe.chosen)
        assert recipe == same
        assert options.data == (str(answers.out / answers.name),)
    _, config, options = table
    compared = [name.rpartition("=")[2] for name in (*config.draft, *options.heads)]
    assert compared == [f"{options.runs}/hf" for _, options in training]


def test_our_step_counts_every_drafted_token() -> None:
    step = our_step(SMALL, 8, ("EAGLE-3", "KV"))
    program, row = compiled(step, None)
    assert row["state_gib"] > 0
    assert timed({"": step}, {"": program}, 1).shape == (1, 1)
    arguments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), step.arguments[:2])
    assert program(*arguments, step.arguments[2])[1]["tokens"] == step.places


def test_a_folder_without_specjax_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no specjax/train\.py"):
        specjax_step(SMALL, tmp_path)
