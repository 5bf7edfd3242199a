"""Draft with an EAGLE-1 head, such as MSD's."""

from __future__ import annotations

from jaxspec.decoding.sources.states import StateHeadSource


class Eagle1(StateHeadSource):
    """Read the target's last hidden state."""

    name = "eagle1"
