"""Options of a new head that its kind lacks are refused, and its numbers are checked."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.errors import InputError
from jaxspec.heads.making import new_head
from tests import tiny


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"feature": "eagle1", "layers": 2}, "EAGLE-1 head: layers 2 is not an option"),
        ({"target_layers": (1,)}, r"KV head: target_layers \(1,\) is not an option"),
        (
            {"feature": "fused", "target_layers": (2, 0, 1)},
            r"EAGLE-3 head: reads target layers \[2, 0, 1\]; give them in order",
        ),
        ({"width": 64}, "KV head: width 64 is not an option .* make one of Gemma 4 assistant$"),
        ({"feature": "block", "images": "zero"}, "DFlash head: images 'zero' is not an option"),
        ({"parallel": True, "own_keys": False}, "one-pass KV head: own_keys False is not an"),
        ({"feature": "fused", "reads_text": False}, "EAGLE-3 head: reads_text False is not"),
        ({"feature": "eagle3"}, "feature: 'eagle3' is unknown; did you mean 'eagle1'"),
        (
            {"feature": "fused", "target_layers": (0, 1, 1), "key_layers": (0,)},
            r"EAGLE-3 head: key_layers \(0,\) is not an option of this kind",
        ),
        ({"feature": "fused", "parallel": True}, "EAGLE-3 head: parallel is an option of KV heads"),
        ({"markov": 2}, r"KV head: markov 2 is not .* one-pass KV head, DFlash"),
        ({"layers": 0}, "layers: 0; give a whole number, 1 or more"),
        ({"feature": "block", "layers": 0}, "layers: 0; give a whole number, 1 or more"),
        ({"feature": "assistant", "width": -1}, "width: -1; give a whole number, 1 or more"),
        ({"parallel": True, "markov": -1}, "markov: -1; give a number from 0"),
        ({"image_slots": 2, "gamma": 0}, "gamma: 0; give a whole number, 1 or more"),
        ({"feature": "eagle1", "gamma": 0}, "gamma: 0; give a whole number, 1 or more"),
    ],
)
def test_options_that_make_no_head_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        new_head(tiny.CONFIG, **options)


def test_defaults_and_pooled_images_are_options_of_every_kind() -> None:
    """Defaults and pooled images are options of every kind, as the command line gives all options,
    and as a KV head's recipe trains other kinds.
    """
    pooled = {"image_slots": 2, "slot_bias": True, "pooling": "linear"}
    defaults = {"layers": 1, "target_layers": (), "width": 1024, "markov": 0, "own_keys": True}
    head = new_head(tiny.CONFIG, feature="eagle1", images="zero", **pooled, **defaults)
    assert head == new_head(tiny.CONFIG, feature="eagle1", images="zero")
