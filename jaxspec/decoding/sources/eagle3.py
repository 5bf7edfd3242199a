"""Draft with an EAGLE-3 head."""

from __future__ import annotations

from jaxspec.decoding.sources.states import StateHeadSource


class Eagle3(StateHeadSource):
    """Read states of some of the target's layers."""

    name = "eagle3"
