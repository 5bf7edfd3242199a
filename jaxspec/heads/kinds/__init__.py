"""List the kinds of draft heads, each defined in its own file."""

from __future__ import annotations

from typing import Any

from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Kind
from jaxspec.heads.kinds import assistant, dflash, eagle1, eagle3, kv_head, mtp, one_pass, vispec

KINDS: tuple[Kind[Any], ...] = (
    kv_head.KIND,
    one_pass.KIND,
    dflash.KIND,
    eagle3.KIND,
    eagle1.KIND,
    vispec.KIND,
    assistant.KIND,
    mtp.KIND,
)
"""All kinds; files that several might have written are the first one's."""


def kind_of(config: HeadConfig) -> Kind[Any]:
    """Return the kind of a head."""
    return next(kind for kind in KINDS if kind.config is type(config))
