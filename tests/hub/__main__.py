"""Runs commands of README and docs against the twins, one after the other, each as its page has it, with --debug.

python -m tests.hub                       # all that are about models of the hub: an hour or more
python -m tests.hub "collaborative cos" ibed   # those that hold one of these texts
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from jaxspec.command import load_preset, preset_names
from train import prepare
from train.recipe import KIND

import tests.conftest  # noqa: F401  # the settings of tests
from tests.hub.build import build_hub
from tests.hub.conftest import cached_at
from tests.hub.pages import commands, keep_trial, lay_out, run, why_not


def main(*texts: str) -> int:
    """Run the commands in one new folder; return how many did not come to their end."""
    home, failed = Path(tempfile.mkdtemp(prefix="hub_of_twins_")), 0
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    build_hub(home / "hub")
    folder = home / "reader"
    folder.mkdir()
    lay_out(folder)
    os.chdir(folder)
    recipes = [load_preset(KIND, name) for name in preset_names(KIND)]
    for name in {name for recipe in recipes for stage in recipe.stages for name, _ in stage.data} | {"my_mix_t0"}:
        if not name.startswith("picturebook"):
            prepare.main(prepare.Llava(Path("mix.json"), name, Path("photos")))
    asked = dict.fromkeys(
        command._replace(page="") for command in commands() if any(text in command.text for text in texts or [""])
    )
    with cached_at(home / "hub"):
        for command in asked:
            if why_not(command):
                continue
            begun, told = time.monotonic(), "done"
            try:
                run(command)
            except (Exception, SystemExit) as error:
                told, failed = f"{type(error).__name__}: {error}", failed + 1
            keep_trial(folder / "runs")
            print(f"{time.monotonic() - begun:.0f} s, {told}: {command.text}", file=sys.stderr)
    print(f"{home}: {failed} commands failed", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
