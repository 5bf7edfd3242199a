"""Break one promise after another by a change of `mutants.txt`, and see that a test of the fast
tier notices.

python -m tests.mutants              # all, in copies of the tree
python -m tests.mutants residual     # those whose names hold one of these texts
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    name: str
    file: str
    """File below `jaxspec/`."""
    old: str
    """Text that occurs once in it."""
    new: str
    test: str
    """Test below `tests/` that must fail."""


SHARED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
}
"""Environment of the runs: programs that a mutant does not change are those of the whole suite."""


def _read(text: str) -> Mutant:
    """Return a mutant: its name, its file, the lines of a diff, and its test."""
    name, file, *lines, test = text.split("\n")
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(name, file, old, new, test)


MUTANTS = [*map(_read, (ROOT / "tests" / "mutants.txt").read_text().strip("\n").split("\n\n"))]


def outcome(mutant: Mutant, tree: Path) -> str:
    """Run the mutant's test on a copy of the tree; return "caught" or what happened instead."""
    path = tree / "jaxspec" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"{mutant.old!r} occurs {source.count(mutant.old)} times in jaxspec/{mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    command = (sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider")
    try:
        run = subprocess.run(
            (*command, "-m", "not full", f"tests/{mutant.test}"),
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), **SHARED},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(source)
    if run.returncode == 1 and "\nFAILED" in run.stdout:
        return "caught"
    return "not noticed" if run.returncode == 0 else f"no test ran:\n{run.stdout[-2000:]}"


def main(*texts: str) -> int:
    """Run the mutants whose names hold one of the texts; return how many were not caught."""
    mutants = [one for one in MUTANTS if any(text in one.name for text in texts or [""])]
    if not mutants:
        sys.exit(f"mutants: no name holds {' or '.join(map(repr, texts))}; see tests/mutants.txt")
    absent = shutil.ignore_patterns(".*", "runs", "__pycache__", "build", "dist")
    trees: SimpleQueue[Path] = SimpleQueue()
    with ExitStack() as stack:
        cores = int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", os.cpu_count() or 1))
        workers = min(len(mutants), cores)
        for _ in range(workers):
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tree"
            trees.put(Path(shutil.copytree(ROOT, tree, ignore=absent, symlinks=True)))

        def try_out(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                return outcome(mutant, tree)
            finally:
                trees.put(tree)

        outcomes = []
        with ThreadPoolExecutor(workers) as pool:
            for mutant, found in zip(mutants, pool.map(try_out, mutants)):
                print(f"{mutant.name}: {found}", flush=True)
                outcomes.append(found)
    return sum(found != "caught" for found in outcomes)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, end="")
        sys.exit()
    sys.exit(main(*sys.argv[1:]))
