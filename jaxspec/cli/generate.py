"""`jaxspec generate`: answer a prompt about images with one model, faster with a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.cli.shared import Ask, answer
from jaxspec.cli.speculation import Speculation
from jaxspec.decoding.drafting.weighting import parse_weighting
from jaxspec.engine.config import capped_gamma
from jaxspec.engine.engine import Result
from jaxspec.engine.metrics import acceptance_metrics, block_fields
from jaxspec.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Generate(Ask, Speculation):
    """Answer a prompt, with or without images, with the target. A draft makes the answer faster and
    never changes it."""


def run(args: Generate) -> None:
    """Print the answer; check options before any model is read."""
    if args.gamma < 1:
        raise InputError(f"--gamma: {args.gamma}; give 1 or more, or give no draft")
    # The cut is reported, which would mislead without drafts.
    gamma = args.gamma
    if args.draft or args.views:
        gamma = capped_gamma("--gamma", gamma, args.max_new_tokens)
    config = args.config(gamma, batch_size=1, generation_config=args.scores.generation_config)
    request = args.request()
    engine, reports = args.engine(config)

    def describe(result: Result) -> tuple[dict[str, Any], str]:
        names, block = engine.assembly.mixture.names, block_fields(config)
        block = block if names else dict.fromkeys(block) | {"gamma": 0}
        stats = acceptance_metrics([result.stats]) | block
        length = stats["tokens_per_pass"]
        stats["views"] = list(names) or None
        stats["weighting"] = str(parse_weighting(config.weighting)) if names else None
        return stats, f"{'-' if length is None else f'{length:.2f}'} tokens per target pass"

    answer(args, engine, request, describe, *reports)
