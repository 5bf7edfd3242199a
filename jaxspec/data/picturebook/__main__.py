"""`python -m jaxspec.data.picturebook OUT.png`: write the contact sheet."""

from __future__ import annotations

import sys

from jaxspec.data.picturebook.sheet import contact_sheet
from jaxspec.errors import InputError

USAGE = "usage: python -m jaxspec.data.picturebook OUT.png"


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 after one line on standard error."""
    if arguments in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nWrites the contact sheet: pages and dialogues of every kind of sample.")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        contact_sheet(arguments[0])
    except InputError as error:
        print(f"picturebook: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
