"""Run commands of README and docs against the twins, one after the other, each as its page has it,
with --debug.

python -m tests.hub                       # all that are about models of the hub: an hour or more
python -m tests.hub "collaborative cos" ibed   # those that hold one of these texts
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import tests.conftest  # noqa: F401  # the settings of tests
from tests.hub.build import build_hub
from tests.hub.conftest import cached_at
from tests.hub.pages import commands, keep_trial, lay_out, made_by, run, why_not


def main(*texts: str) -> int:
    """Run the commands in one new folder; return how many did not come to their end."""
    home, failed = Path(tempfile.mkdtemp(prefix="hub_of_twins_")), 0
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    build_hub(home / "hub")
    folder = home / "reader"
    folder.mkdir()
    lay_out(folder)
    os.chdir(folder)
    known = dict.fromkeys(command._replace(page="") for command in commands())
    asked = [command for command in known if any(text in command.text for text in texts or [""])]
    # what the pages' recipes read, whatever is asked for
    sets = [command for command in known if made_by(command)]
    # answers after what was asked
    sets.sort(key=lambda command: command.script == "train.distill_data")
    with cached_at(home / "hub"):
        for command in [*sets, *(command for command in asked if command not in sets)]:
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
