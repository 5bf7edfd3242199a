"""Write training and test prompts for drafts of a small language model.

    python -m train.prompts --data path/to/data
    python -m train.prepare text --data runs/data/prompts/train.jsonl --name prompts
    python -m train.distill_data --target smollm2-135m --data runs/data/prompts --name smollm2_t0

Training prompts are GSM8K's train split, and functions to complete, docstrings to summarise and
names to explain from Python's standard library: lines {id, question, answer}. The target then
writes answers of its own. Test prompts, in OUT/test as {id, turns, reference}, are GSM8K's test
split, HumanEval, the questions of MMSpec and LLaVA-Bench without images, and one in eight modules
of the standard library.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxspec.cli.options import run_script
from jaxspec.data.rows import local_rows
from jaxspec.errors import InputError, check_counts, reading
from jaxspec.files import trial_of, write_text

LONGEST, SHORTEST = 1200, 200
"""Characters of a docstring that is to be summed up: longer ones are cut, shorter ones left out."""
MOST_LINES = 25
"""Lines of a function that is to be completed."""
HELD = 8
"""One in so many modules is held apart."""


@dataclass(frozen=True)
class Options:
    """Sources of the questions, and the folder of the prompts."""

    data: Path
    """Folder with gsm8k/train.jsonl and test.jsonl, humaneval/HumanEval.jsonl.gz,
    mmspec/mmspec_24.jsonl and llava/qa90_questions.jsonl."""
    out: Path = Path("runs/data/prompts")
    """Receives train.jsonl and test/KIND.jsonl."""
    most: int | None = None
    """Maximum prompts to train on, which the kinds give by turns; the default is all."""
    debug: bool = False
    """Try the command out: four prompts of each kind, into runs/debug."""


Prompts = dict[str, list[tuple[str, str]]]
"""Questions of each kind, with the answers of their source."""


def main(options: Annotated[Options, tyro.conf.arg(name="")]) -> Path:
    """Write the files, and print how many prompts of each kind they hold."""
    check_counts(most=1 if options.most is None else options.most)
    learned, held_out = defaultdict(list), defaultdict(list)
    for prompts, split in ((learned, "train"), (held_out, "test")):
        file = options.data / "gsm8k" / f"{split}.jsonl"
        prompts["gsm8k"] += _columns(file, "question", "answer")
    file = options.data / "humaneval" / "HumanEval.jsonl.gz"
    held_out["humaneval"] += [
        (_completed(head), remainder)
        for head, remainder in _columns(file, "prompt", "canonical_solution")
    ]
    file = options.data / "mmspec" / "mmspec_24.jsonl"
    with reading(f"{file}: turns without a first one", "fetch the file again"):
        held_out["chat"] += [(turns[0], "") for (turns,) in _columns(file, "turns")]
    file = options.data / "llava" / "qa90_questions.jsonl"
    held_out["chat"] += [(text, "") for (text,) in _columns(file, "text")]
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        apart = sha256(name.encode()).digest()[0] % HELD == 0
        for file in (library / f"{name}.py", *sorted((library / name).rglob("*.py"))):
            module = file.relative_to(library).with_suffix("")
            if file.is_file() and "test" not in str(module):
                _read_source(
                    file.read_text(encoding="utf-8"),
                    ".".join(module.parts),
                    held_out if apart else learned,
                )
    out = trial_of(options.out) if options.debug else options.out
    few = 4 if options.debug else None
    kinds = []
    for kind, pairs in learned.items():
        questions = [
            {"id": f"{kind}-{i}", "question": ask, "answer": answer}
            for i, (ask, answer) in enumerate(pairs[:few])
        ]
        kinds.append(sorted(questions, key=lambda row: sha256(row["id"].encode()).digest()))
    # The kinds take turns, so that any beginning of the file has as many prompts of each.
    rows = [row for turn in zip_longest(*kinds) for row in turn if row][: options.most]
    _write(out / "train.jsonl", rows)
    for kind, pairs in held_out.items():
        questions = [
            {"id": i, "turns": [question], "reference": answer}
            for i, (question, answer) in enumerate(pairs[:few])
        ]
        _write(out / "test" / f"{kind}.jsonl", questions)
    trained = Counter(row["id"].partition("-")[0] for row in rows)
    tested = {kind: len(pairs[:few]) for kind, pairs in held_out.items()}
    for name, counts in (("train.jsonl", trained), ("test", tested)):
        listing = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        print(f"wrote {out / name}: {listing}")
    return out


def _read_source(source: str, module: str, prompts: Prompts) -> None:
    """Add the questions of a module's source, which is parsed and never run."""
    tree, lines = ast.parse(source), source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        if node in tree.body:
            name = f"`{module}.{node.name}`"
            question = f"What does {name} of Python's standard library do, and when is it of use?"
            prompts["explain"].append((question, text))
        if len(text) >= SHORTEST:
            question = f"Summarize the following text in two sentences.\n\n{text[:LONGEST]}"
            prompts["summary"].append((question, text.split("\n\n")[0]))
        end = node.end_lineno or 0
        if (
            isinstance(node, ast.FunctionDef)
            and len(node.body) > 1
            and end - node.lineno < MOST_LINES
        ):
            parts = (lines[node.lineno - 1 : last] for last in (node.body[0].end_lineno, end))
            head, whole = (textwrap.dedent("\n".join(part)) for part in parts)
            prompts["code"].append((_completed(head), whole))


def _completed(head: str) -> str:
    return f"Complete this Python function.\n\n```python\n{head}\n```"


def _columns(file: Path, *names: str) -> list[tuple[Any, ...]]:
    """Return these columns of a file's rows; raise InputError for a row without one."""
    if not file.is_file():
        raise InputError(f"{file}: no such file; give the folder that holds it as --data")
    rows = []
    for row in local_rows(file):
        with reading(f"{row.origin}: lacks a column", "fetch the file again"):
            rows.append(tuple(row.values[name] for name in names))
    return rows


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    run_script(main, __doc__)
