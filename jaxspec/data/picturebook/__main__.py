"""`python -m jaxspec.data.picturebook OUT.png`: write the contact sheet."""

from __future__ import annotations

import sys

from jaxspec.data.picturebook.sheet import contact_sheet


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 after one line on standard error."""
    if len(arguments) != 1:
        print("usage: python -m jaxspec.data.picturebook OUT.png", file=sys.stderr)
        return 2
    try:
        contact_sheet(arguments[0])
    except OSError as error:
        print(f"picturebook sheet: cannot write {arguments[0]!r}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
