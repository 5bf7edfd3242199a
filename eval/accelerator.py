"""Every figure that needs an accelerator, in one go: passes and forced loops of LLaVA-1.5 with its drafts.

    python -m eval.accelerator --out results/accelerator

Weights are random and made on the device; nothing is fetched. The parts run one after the other, each a process of
its own, so that one that fails or runs out of time leaves the others' results; what is done lies in --out already.
Where one was not done the exit code is 1.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from jaxspec.command import run_script
from jaxspec.errors import InputError, nearest

PARTS: dict[str, tuple[str, ...]] = {
    "llava7b_68m": ("eval.latency", "llava7b_68m", "--parts", "passes", "forced"),
    "llava7b_160m": ("eval.latency", "llava7b_160m", "--parts", "passes", "forced", "--views", "1"),
    "startup": ("eval.latency", "mini", "--parts", "startup"),
    "llava7b_images": ("eval.latency", "llava7b_68m", "--parts", "images"),
    "llava13b_68m": ("eval.latency", "llava13b_68m", "--parts", "passes", "forced", "--views", "1"),
    "llava13b_160m": ("eval.latency", "llava13b_160m", "--parts", "passes"),
    "throughput": ("eval.latency", "llava7b_68m", "--parts", "forced", "--batches", "4", "16", "--views", "1"),
}
"""The most wanted first."""


def main(
    out: Path = Path("runs/accelerator"),
    minutes: float = 9.5,
    parts: tuple[str, ...] = tuple(PARTS),
    debug: bool = False,
) -> None:
    """Runs the parts until the time is spent.

    Args:
      out: a directory for each part is made in it.
      minutes: the part that runs when they are over is ended, and the rest left out.
      parts: which of them.
      debug: try the parts out, each with its own --debug.
    """
    for name in parts:
        if name not in PARTS:
            raise InputError(f"parts: no part {name!r}; {nearest(name, list(PARTS))}")
    end = time.monotonic() + 60 * minutes
    failed = []
    for name in parts:
        script, *options = PARTS[name]
        command = [sys.executable, "-m", script, *options, "--out", str(out / name), *(["--debug"] if debug else [])]
        begun = time.monotonic()
        try:
            code = subprocess.run(command, timeout=max(end - begun, 1), check=False).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
        if code != 0:
            failed.append(name)
        print(f"{name}: {code}, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    if failed:
        sys.exit(f"accelerator: not done: {', '.join(failed)}")


if __name__ == "__main__":
    run_script(main, __doc__)
