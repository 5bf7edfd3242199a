"""Describe how rotary positions are stretched past the trained context, or split for images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from jaxspec.config.schema import check_choice, check_positive, known_fields
from jaxspec.errors import InputError

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "original_max_position_embeddings",
    ),
}
"""The keys that each `rope_type` reads; a file may have more."""


@dataclass(frozen=True)
class RopeScaling:
    """Stretch rotary frequencies past the trained context (`linear`, `llama3`, `yarn`).

    `proportional` keeps only the first ones, and turns no other pair of numbers.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    """The trained context, of `llama3` and `yarn`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """`yarn`: frequencies with more turns than this in the trained context are kept."""
    beta_slow: float = 1.0
    """`yarn`: those with fewer are divided by `factor`."""
    truncate: bool = True
    """`yarn`: whether the range between the two is widened to whole dimensions."""
    partial_rotary_factor: float = 1.0
    """`proportional`: share of the frequencies that turn."""
    attention_factor: float = 0.0
    """Scale of rotated queries and keys; 0 means 0.1 ln(factor) + 1 for YaRN, and 1 otherwise."""
    mrope_section: tuple[int, ...] = ()
    """M-RoPE's numbers of frequencies for time, height and width; empty for one position."""
    mrope_interleaved: bool = False
    """Whether time, height and width take turns among the frequencies, as in Qwen3-VL."""

    def __post_init__(self) -> None:
        """Set the default attention factor; raise InputError for values out of range."""
        check_choice("text config", self, "rope_type", *_ROPE_KEYS)
        if not self.attention_factor:
            factor = self.factor if self.rope_type == "yarn" else 1.0
            object.__setattr__(self, "attention_factor", _yarn_magnitude(factor, 1.0))
        numbers = "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"
        check_positive("text config", self, *numbers, "partial_rotary_factor", "attention_factor")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"text config: low_freq_factor {self.low_freq_factor} of rope type llama3; give "
                f"less than high_freq_factor, {self.high_freq_factor}"
            )

    def check_sections(self, width: int) -> None:
        """Raise InputError unless M-RoPE's sections, if any, share the frequencies of a head.

        width: Numbers of a head.
        """
        sections = self.mrope_section
        if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != width // 2):
            raise InputError(
                f"text config: mrope_section {list(sections)!s:.40} of heads of {width}; "
                f"give three numbers that add up to {width // 2}"
            )

    @property
    def one_axis(self) -> Self:
        """Return the scaling of positions without M-RoPE's axes."""
        return replace(self, mrope_section=(), mrope_interleaved=False)

    @property
    def mrope_axes(self) -> np.ndarray:
        """Return M-RoPE's axis of each frequency: 0 time, 1 height, 2 width.

        Sections (3, 2, 2) give 0001122, or interleaved 0120120.
        """
        sections = self.mrope_section
        if not self.mrope_interleaved:
            return np.array([axis for axis, size in enumerate(sections) for _ in range(size)], int)
        axes = np.zeros(sum(sections), np.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes

    def context(self, positions: int) -> int:
        """Return the most tokens of a row, for a config.json that says `positions`.

        As in vLLM, `linear` stretches these, and `yarn` the trained context: 32,768 tokens by a
        factor of 4 to 131,072. Other kinds' files say the stretched context, and some of `yarn`.
        """
        if self.rope_type == "linear":
            return int(positions * self.factor)
        if self.rope_type == "yarn":
            return max(positions, int(self.original_max_position_embeddings * self.factor))
        return positions

    @classmethod
    def from_hf(cls, raw: dict[str, Any], positions: int) -> RopeScaling:
        """Read a rotary dictionary of transformers 4 or 5; `positions` is the model's context."""
        entries = known_fields(cls, raw)
        kind = raw.get("rope_type") or raw.get("type") or "default"
        kind = "default" if kind == "mrope" else kind
        read = (*_ROPE_KEYS.get(kind, ()), "mrope_section", "mrope_interleaved")
        entries = {key: value for key, value in entries.items() if key in read}
        if kind in ("llama3", "yarn"):
            entries.setdefault("original_max_position_embeddings", positions)
        if kind == "yarn":
            entries.setdefault("factor", positions / entries["original_max_position_embeddings"])
            over, under = raw.get("mscale"), raw.get("mscale_all_dim")
            if over and under:
                ratio = _yarn_magnitude(entries["factor"], over) / _yarn_magnitude(
                    entries["factor"], under
                )
                entries.setdefault("attention_factor", ratio)
        return cls(kind, **entries)

    def to_hf(self) -> dict[str, Any]:
        mrope = [key for key in ("mrope_section", "mrope_interleaved") if getattr(self, key)]
        keys = ("rope_type", *_ROPE_KEYS[self.rope_type], *mrope)
        return {key: getattr(self, key) for key in keys}


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
