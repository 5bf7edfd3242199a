"""Train ten heads of `smollm2-eyes` alike, and compare their tokens per pass.

    python -m train.alike
    python -m train.alike --steps 600 --out runs/alike600

The heads are KV heads, EAGLE-1 and EAGLE-3 heads with several rules for images, and a DFlash head.
All have one layer, and learn from the same answers of the target in the same order, at the same
number of anchors. Each part is a process of its own: the answers, head after head, and the table. A
stopped part goes on where it was, so the same command continues a stopped run. Writes the table
into --out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxspec.cli.options import run_script

ANSWERS = "eyes_alike_t0"
BASELINE = "KV head"
HEADS = {
    BASELINE: "--head.feature last_hidden",
    "one-pass KV head": "--head.feature last_hidden --head.parallel --head.markov 64",
    **{
        f"EAGLE-1, {rule}": f"--head.feature eagle1 --head.images {rule}"
        for rule in ("placeholder", "embedding", "unfused", "zero")
    },
    **{
        f"EAGLE-3, {rule}": f"--head.feature fused --head.images {rule}"
        for rule in ("placeholder", "embedding", "zero")
    },
    "DFlash": "--head.feature block --head.target-layers 2 15 27",
}
"""Options of the recipe by name. A DFlash head reads the same three states as an EAGLE-3 head."""


def main(
    steps: int = 150, samples: int = 256, limit: int = 16, out: Path = Path("runs/alike")
) -> None:
    """Run all parts, and end with the first that fails.

    Args:
      steps: Training steps of four rows.
      samples: Questions that the target answers for training.
      limit: Questions of each set in the table.
      out: Directory of the heads, and of the table.
    """
    for arguments in commands(steps, samples, limit, out):
        if code := subprocess.run([sys.executable, "-m", *arguments]).returncode:
            sys.exit(code)


def commands(steps: int, samples: int, limit: int, out: Path) -> Iterator[list[str]]:
    """Yield the arguments of each part's command."""
    shipped = "jaxspec_demo/smollm2_eyes/kv_head"  # answers sooner, and the same
    yield (
        f"train.distill_data --target smollm2-eyes --draft {shipped} --name {ANSWERS} "
        f"--data picturebook:describe,read,exist,reason,chart --samples {samples} --chunk 32 "
        "--max-new-tokens 128 --prompt-buckets 256 448 --image-buckets 1 --batch-size 8"
    ).split()
    heads = {name: out / name.lower().replace(", ", "_").replace(" ", "_") for name in HEADS}
    same = f"--kv-head.steps {steps} --kv-head.batch 4 --kv-head.warmup {min(20, steps // 5)}"
    for name, folder in heads.items():
        yield [
            *f"train.recipe smollm2_eyes_kv {HEADS[name]} {same}".split(),
            *f"--data runs/data/{ANSWERS} --runs".split(),
            str(folder),
        ]
    directories = [f"{name}={folder}/hf" for name, folder in heads.items() if name != BASELINE]
    yield [
        *("eval.kv_head", "eyes", "--draft", f"{heads[BASELINE]}/hf"),
        *["--rows", "lookup", "--gammas", "4"],
        *f"--sets describe read exist reason chart --turns 1 --limit {limit}".split(),
        *("--batch-size", "8", "--no-times", "--out", f"{out}/table"),
        *("--against", BASELINE, "--heads", *directories),
    ]


if __name__ == "__main__":
    run_script(main, __doc__)
