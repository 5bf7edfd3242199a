"""`jaxspec generate`: answer a prompt about images with one model, faster with a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jaxspec.cli.shared import Ask, answer
from jaxspec.cli.speculation import Drafting, Model, load_engine
from jaxspec.engine.engine import Result
from jaxspec.engine.metrics import acceptance_metrics, block_fields


@dataclass(frozen=True)
class Generate:
    """Answer a prompt, with or without images, with the target. A draft makes the answer faster and
    never changes it.

    You need only these four options: --target, --draft, --image and --prompt. `jaxspec drafts
    TARGET` lists drafts.

    $ jaxspec generate --target jaxspec_demo/mini/target \\
        --draft jaxspec_demo/mini/draft --image jaxspec_demo/page.png \\
        --prompt "Which word can you read on the sign?"
    """

    model: Model
    drafting: Drafting
    ask: Annotated[Ask, tyro.conf.arg(name="")]


def run(args: Generate) -> None:
    """Print the answer; check options before any model is read."""
    models, drafting, ask = args.model, args.drafting, args.ask
    how = {"batch_size": 1, "generation_config": ask.scores.generation_config}
    config = drafting.config(ask.output.max_new_tokens, **how)
    request = ask.request(models)
    engine, reports = load_engine(models, drafting, config, ask.check_target)

    def describe(result: Result) -> tuple[dict[str, Any], str]:
        names, block = engine.assembly.mixture.names, block_fields(config)
        block = block if names else dict.fromkeys(block) | {"gamma": 0}
        stats = acceptance_metrics([result.stats]) | block
        length = stats["tokens_per_pass"]
        stats["views"] = list(names) or None
        stats["weighting"] = str(config.rule) if names else None
        line = f"{'-' if length is None else f'{length:.2f}'} tokens per target pass"
        policy = engine.batcher.policy
        return stats, line if policy is None else f"{line}; {policy.gained(result.plans)}"

    answer(ask, models, engine, request, describe, *reports)
