"""The table of supported families in README.md, made from `FAMILIES`: `python -m jaxspec.models.support README.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jaxspec.errors import InputError
from jaxspec.models import FAMILIES

START, END = "<!-- families: python -m jaxspec.models.support README.md -->", "<!-- /families -->"


def support_table() -> str:
    """One row a family, in Markdown."""
    titles = ("`model_type`", "family", "image input", "for example", "notes")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model_type, family in FAMILIES.items():
        examples = ", ".join(f"`{name}`" for name in family.examples)
        cells = (f"`{model_type}`", family.title, family.image_input, examples, family.notes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The text with the table between its markers. Raises InputError where it has none."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise InputError(f"README: holds no markers {START} ... {END}; put them where the table shall stand")
    return re.sub(f"({START}\n).*?({END})", lambda found: f"{found[1]}{support_table()}\n{found[2]}", text, flags=re.S)


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
