"""`jaxspec generate`: answer a prompt about images with one model, faster with a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.ask import Ask, answer, check_views, clear, numbers, progress, view_names
from jaxspec.decoding.captioners import check_captioner, load_captioner
from jaxspec.decoding.drafters import ContextPolicy
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Result
from jaxspec.decoding.engine_config import capped_gamma
from jaxspec.decoding.metrics import acceptance_metrics, block_fields
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.prompts.views import needs_captioner
from jaxspec.sharding import make_mesh


@dataclass(frozen=True, kw_only=True)
class Generate(Ask):
    """Answer a prompt, with or without images, with the target. A draft makes the answer faster and
    never changes it."""

    target: str
    """Directory in Hugging Face layout, GGUF file or hub id of a vision-language model (LLaVA-1.5,
    LLaVA-NeXT (1.6), LLaVA-OneVision, Qwen2.5-VL, Qwen3-VL) or a text model (Llama, Vicuna;
    Mistral; Qwen2, Qwen2.5; Qwen3; OPT)."""
    adapter: str | None = None
    """Directory of the target's LoRA adapter in PEFT's format; it is merged at loading."""
    draft: str | None = None
    """Directory or hub id of a small LLaVA or text model with the target's tokeniser."""
    kv_head: str | None = None
    """Directory or hub id of the target's KV head or EAGLE-3 head. It drafts alone, or with --draft
    as one more view, kv. With none of --draft, --kv-head and --views lookup the target decodes
    alone."""
    views: str | None = None
    """Views of the prompt that the draft sees, comma-separated: M (the prompt itself; the default),
    T (text only), C (captions for images), P (image tokens pooled to a quarter), P36 (pooled to
    36), the variants T-literal, T-special, T-slots, P-1d, P-after; then kv, a KV head; and last
    lookup, what followed the newest tokens earlier in prompt and answer. lookup needs no draft."""
    captioner: str | None = None
    """Captioner of view C: jax:DIR (any vision-language model that --target takes), florence2:ID,
    blip:ID or file:CAPTIONS.jsonl."""
    weights: str | None = None
    """Weight of each view, comma-separated; uniform by default."""
    weighting: str = "static"
    """How weights learn from verified tokens: static; mt-paper and mtcp-paper (MT* and MTCP* as in
    TABED); mt-release (both as its code runs them: a grid), mtcp-release (its code's inverse KL);
    or a rule with options, as grid:window=16,measure=tvd."""
    gamma: int = 5
    """Draft length: drafted tokens in each block, or on a tree's longest path."""
    tree: str | None = None
    """Draft a tree instead of a chain: 2 (two children a node), 2:32 (cut to 32 nodes), chains:2,
    or dynamic:4:24."""
    width: int | None = None
    """Tokens that each pass of the target reads, padding included: gamma + 1 or more. In 16 bits
    the answer then equals plain decoding's at the same width, token for token. Not with --tree."""
    context: ContextPolicy = "extrapolate"
    """What to do when a view is longer than the draft's trained positions: extrapolate (draft on),
    drop_view (give the view weight 0), or error."""
    revision: str | None = None
    """Branch, tag or commit of a target on the hub."""
    draft_revision: str | None = None
    """Branch, tag or commit of a draft on the hub."""
    model_parallel: int = 1
    """Devices to split the target over; each holds the whole draft."""


OF_DRAFTS = ("views", "captioner", "weights", "weighting", "gamma", "tree", "context")
"""Options that need a draft or a KV head."""


def run(args: Generate) -> None:
    """Print the answer; check options before any model is read."""
    weights = None if args.weights is None else numbers("--weights", args.weights)
    if args.gamma < 1:
        raise InputError(f"--gamma: {args.gamma}; give 1 or more, or give no draft")
    default = ("M",) * (args.draft is not None) + ("kv",) * (args.kv_head is not None)
    views = default if args.views is None else view_names(args.views)
    # The cut is reported, which would mislead without drafts.
    gamma = capped_gamma("--gamma", args.gamma, args.max_new_tokens) if views else args.gamma
    config = EngineConfig(
        views=views,
        weights=weights,
        weighting=args.weighting,
        gamma=gamma,
        tree=args.tree,
        width=args.width,
        context=args.context,
        batch_size=1,
    )
    _check_drafts(args, views)
    images, request = args.pictures(), args.request()
    mesh = None if args.model_parallel == 1 else make_mesh(args.model_parallel)
    models = [(args.target, args.revision)]
    models += [] if args.draft is None else [(args.draft, args.draft_revision)]
    paths = [locate(*model) for model in models]
    for path in paths:
        directories.read_config(path)

    load = partial(LoadedModel.load, dtype=args.computes_in, tiles=args.tiles)
    progress(f"loading target {paths[0]}")
    target = load(paths[0], mesh=mesh, weights=args.target_weights, adapter=args.adapter)
    target = target if args.kv_head is None else target.with_head(args.kv_head)
    loaded = [target]
    if args.draft is not None:
        progress(f"loading draft {paths[1]}")
        loaded.append(load(paths[1], share_tower_with=target))
    captioner = None
    if args.captioner is not None:
        progress(f"loading captioner {args.captioner}")
        captioner = load_captioner(args.captioner, args.computes_in, share_tower_with=target)
    clear()  # a warning of the engine's has a line of its own
    engine = Engine(*loaded, config=config, captioner=captioner)

    def describe(result: Result) -> tuple[dict[str, Any], str]:
        drafts, block = engine.assembly.program.drafts, block_fields(config)
        block = block if drafts else dict.fromkeys(block) | {"gamma": 0}
        stats = acceptance_metrics([result.stats]) | block
        length = stats["tokens_per_pass"]
        stats["views"] = list(views) if drafts else None
        stats["weighting"] = str(parse_weighting(config.weighting)) if drafts else None
        return stats, f"{'-' if length is None else f'{length:.2f}'} tokens per target pass"

    reports = (f"{name}: {model.report}" for name, model in zip(("target", "draft"), loaded))
    answer(args, engine, request, images, describe, *reports)


def _check_drafts(args: Generate, views: tuple[str, ...]) -> None:
    """Raise InputError for models that no view uses, and for options that nothing reads."""
    draft, head, shown = args.draft, args.kv_head, ",".join(views)
    if draft is not None and is_kv_head(draft):
        raise InputError(f"--draft: {draft} is a KV head; give it as --kv-head")
    if draft is None and head is None and "lookup" not in views:
        _refuse(args, OF_DRAFTS, "needs a draft; give --draft or --kv-head, or leave it out")
    if draft is None:
        _refuse(args, ["draft_revision"], "needs --draft with a hub id; give one, or leave it out")
    read = check_views(views, draft, head)
    if len(views) == 1:
        _refuse(args, ["weighting"], f"{shown} is one view; name more in --views, or leave it out")
    reads = needs_captioner(read, args.captioner)
    if args.captioner is not None:
        check_captioner(args.captioner)
        if not reads:
            raise InputError(f"--captioner: no view of {shown} shows captions; add C to --views")


def _refuse(args: Generate, names: Sequence[str], why: str) -> None:
    """Raise InputError for the first of these options that has another value than its default."""
    given = [name for name in names if getattr(args, name) != getattr(Generate, name)]
    if given:
        raise InputError(f"--{given[0].replace('_', '-')}: {why}")
