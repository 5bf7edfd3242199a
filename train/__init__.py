"""Train models and drafts; `python -m train.NAME --help` describes each script."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from jaxspec.command import start

NEEDED = ("array_record", "etils", "grain", "optax", "orbax", "tensorflow_datasets")

if sys.argv[0] == "-m":  # the package of a script that `python -m` runs is read before the script
    start("train")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(
            f"train: error: {missing[0]} is not installed; pip install -e '.[train]'",
            file=sys.stderr,
        )
        sys.exit(2)
