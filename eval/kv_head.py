"""Tokens per target pass of KV heads and of what is left out of them, on answers that the target wrote.

    python eval/kv_head.py kv_head --limit 4
    python eval/kv_head.py kv_head --heads linear=runs/linear/kv_head/hf drop=runs/drop/kv_head/hf

The preset's own head is measured as it is, and without the target's keys and values of images or of text (not
trained again). Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tqdm import tqdm

from jaxspec.decoding.engine import Engine, Request
from jaxspec.decoding.loading import LoadedHead
from jaxspec.errors import InputError
from jaxspec.evaluation.block_efficiency import each_turn
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.kv_head import Blocks, head_agreement, walk
from jaxspec.evaluation.report import describe_run, markdown, show, write_results
from jaxspec.runtime import input_errors


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    heads: tuple[str, ...] = ()
    """NAME=DIRECTORY of further heads of the same target."""
    gammas: tuple[int, ...] = (3, 5)
    """Drafted tokens a block."""
    out: Path = Path("runs/kv_head")
    """Directory for results.json, records.jsonl and table.md."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures the preset's head, its ablations and other heads."""
    preset, config, options = parse_command(Options, main.__doc__, args)
    target, _, _ = load_models(config, views=())
    if target.head is None:
        raise InputError(f"preset {preset}: names no kv_head; give one with --kv-head")
    own = target.head
    heads = {
        "KV head": own,
        "- image KV": LoadedHead(replace(own.config, pooling="drop", slot_bias=False), own.params),
        "- text KV": LoadedHead(replace(own.config, reads_text=False), own.params),
    }
    for entry in options.heads:
        name, _, path = entry.partition("=")
        found = target.with_head(path).head
        assert found is not None
        heads[name] = found
    plain = Engine(replace(target, head=None), None, config.plain())
    rows, records = [], []
    for dataset in tqdm(config.sets, unit="set"):
        for turn, questions in each_turn(config, plain, dataset):
            answers = plain.generate([Request(question.prompt, config.max_new_tokens) for question in questions])
            for name, head in heads.items():
                blocks = {gamma: Blocks() for gamma in options.gammas}
                for question, answer in zip(questions, answers, strict=True):
                    agrees = head_agreement(target, head, question.prompt, answer.tokens, max(options.gammas))
                    for gamma in options.gammas:
                        found = walk(agrees, gamma)
                        blocks[gamma] += found
                        records.append({"dataset": dataset, "turn": turn, "sample": question.sample, "row": name}
                                       | {"gamma": gamma, **vars(found)})
                rows += [
                    {"dataset": dataset, "turn": turn, "row": name, "gamma": gamma, "samples": len(answers)}
                    | {"block_efficiency": blocks[gamma].efficiency, "num_spec_steps": blocks[gamma].steps}
                    for gamma in options.gammas
                ]
    title = "Tokens per target pass of KV heads, from one pass over the target's answers"
    header = ["head", "gamma", *config.sets, "avg"]
    cells = []
    for name in heads:
        for gamma in options.gammas:
            found = [r for r in rows if r["row"] == name and r["gamma"] == gamma]
            line = [[r["block_efficiency"] for r in found if r["dataset"] == dataset] for dataset in config.sets]
            means = [float(np.mean([v for v in values if v is not None])) for values in line]
            cells.append([name, str(gamma), *(f"{mean:.2f}" for mean in means), f"{np.mean(means):.2f}"])
    notes = [f"{config.limit} samples a set and turn, greedy, {config.dtype}; cells are means over turns."]
    write_results(options.out, describe_run(preset), rows, records, markdown(title, header, cells, notes))
    show(title, header, cells, notes)


if __name__ == "__main__":
    with input_errors("kv_head"):
        main()
