"""`python -m jaxspec` is the command `jaxspec`."""

from __future__ import annotations

from jaxspec.cli import main

if __name__ == "__main__":
    main()
