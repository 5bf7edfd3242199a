"""Describe a section of a page such as docs/tables-cos.md, and the beginnings of its commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Line:
    """Describe tables and figures of a paper that the same commands measure."""

    tables: tuple[int, ...] = ()
    figures: tuple[int, ...] = ()
    what: str
    """What is compared there, in Markdown; without a command, why there is none."""
    details: tuple[str, ...] = ()
    """What differs from the paper, a point each."""
    command: str = ""
    """Measures it with the paper's own models; of several, each on a line of its own."""
    mini: str = ""
    """Measures the same with the shipped models."""
    needs: str = ""
    """Extras to install for the paper's models, and the gigabytes of weights that the commands
    fetch.
    """

    @property
    def where(self) -> str:
        """Return the numbers as a page has them: `Tables 1, 3; Figure 2`."""
        kinds = (("Table", self.tables), ("Figure", self.figures))
        return "; ".join(
            f"{kind}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            for kind, numbers in kinds
            if numbers
        )


TABLE = "python -m eval.block_efficiency"
LATENCY = "python -m eval.latency"
PASSES = f"{LATENCY} llava7b_68m --dtype float16"
QUALITY = "python -m eval.draft_quality"
HEAD = "python -m eval.kv_head"
TOGETHER = "python -m eval.collaborative"
TRAIN = "python -m train.recipe"
DRAWN = "These figures draw the method and measure nothing, so they have no command."
