"""Measure what drafts gain; `python -m eval.NAME --help` describes each script."""

from __future__ import annotations

import sys

from jaxspec.command import start

if sys.argv[0] == "-m":  # the package of a script that `python -m` runs is read before the script
    start("eval")
