"""What the documentation says of the supported families, made from `FAMILIES`.

    python -m jaxspec.models.support README.md docs/families.md

They stand between two markers, a sentence behind `<!-- families: ... -->` or a table behind
`<!-- families in full: ... -->`, and `<!-- /families -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import fill

from jaxspec.errors import InputError
from jaxspec.models import FAMILIES

BETWEEN = re.compile(r"(<!-- families( in full)?: [^\n]*-->\n).*?(<!-- /families -->)", re.DOTALL)


def support_table() -> str:
    """Return one row a family, in Markdown."""
    titles = ("`model_type`", "family", "image input", "for example", "notes")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model_type, family in FAMILIES.items():
        examples = ", ".join(f"`{name}`" for name in family.examples)
        cells = (f"`{model_type}`", family.title, family.image_input, examples, family.notes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def support_line() -> str:
    """Return the families in a sentence, with one example each."""
    named = [f"{family.title} (`{family.examples[0]}`)" for family in FAMILIES.values()]
    return fill(f"{'; '.join(named)}.", 120, break_long_words=False, break_on_hyphens=False)


def with_table(text: str) -> str:
    """Return the text with the families between its markers. Raises InputError where it has none."""

    def told(found: re.Match[str]) -> str:
        return f"{found[1]}{support_table() if found[2] else support_line()}\n{found[3]}"

    made, count = BETWEEN.subn(told, text)
    if count != 1:
        raise InputError(
            f"page: holds {count} pairs of markers <!-- families: --> ... <!-- /families -->; "
            "put one where they shall stand"
        )
    return made


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
