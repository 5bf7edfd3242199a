"""`jaxspec generate`: answer a prompt about images with one model, faster with a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.heads import is_head, read_draft_config
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.shared import Ask, answer, clear, numbers, progress, view_names
from jaxspec.config.heads.states import ImageRule
from jaxspec.decoding.drafting.weighting import parse_weighting
from jaxspec.engine.captioners import check_captioner, load_captioner
from jaxspec.engine.config import capped_gamma
from jaxspec.engine.drafts import Mixture, mixture
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Result
from jaxspec.engine.metrics import acceptance_metrics, block_fields
from jaxspec.errors import InputError
from jaxspec.loading import load_draft
from jaxspec.prompts.views import needs_captioner, parse_weights
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
    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Directory or hub id of a small LLaVA or text model with the target's tokeniser, or of a head
    of the target: KV, EAGLE-1, MSD or EAGLE-3. Repeat the option for a model and a head, which then
    draft together. With neither --draft nor --views lookup the target decodes alone."""
    views: str | None = None
    """Views of the prompt that a draft model sees, comma-separated: M (the prompt itself; the
    default), T (text only), C (captions for images), P (image tokens pooled to a quarter), P36
    (pooled to 36), the variants T-literal and T-slots; and last lookup, what followed the newest
    tokens earlier in prompt and answer. lookup needs no draft."""
    captioner: str | None = None
    """Captioner of view C: jax:DIR (any vision-language model that --target takes), florence2:ID,
    blip:ID or file:CAPTIONS.jsonl."""
    draft_images: ImageRule | None = None
    """What an EAGLE head reads at the slots of images, where neither its files nor its id tell:
    placeholder, the embedding (for heads trained on it), unfused (MSD) or zero."""
    weights: str | None = None
    """Weight of each view, then of a head, then of lookup, comma-separated; uniform by default."""
    weighting: str = "static"
    """How weights learn from verified tokens: static; mt-paper and mtcp-paper (MT* and MTCP* as in
    TABED); mt-release (both as its code runs them: a grid), mtcp-release (its code's inverse KL);
    or a rule with options, as grid:window=16,measure=tvd."""
    gamma: int = 5
    """Draft length: drafted tokens in each block, or on a tree's longest path."""
    tree: str | None = None
    """Draft a tree instead of a chain: 2 (two children a node), 2:32 (cut to 32 nodes), or
    dynamic:4:24."""
    width: int | None = None
    """Tokens that each pass of the target reads, padding included: gamma + 1 or more. In 16 bits
    the answer then equals plain decoding's at the same width, token for token. Not with --tree."""
    revision: str | None = None
    """Branch, tag or commit of a target on the hub."""
    draft_revision: str | None = None
    """Branch, tag or commit of drafts on the hub."""
    model_parallel: int = 1
    """Devices to split the target over; each holds the whole draft."""


OF_DRAFTS = ("captioner", "weights", "weighting", "gamma", "tree")
"""Options that need a draft."""


def run(args: Generate) -> None:
    """Print the answer; check options before any model is read."""
    weights = None if args.weights is None else numbers("--weights", args.weights)
    if args.gamma < 1:
        raise InputError(f"--gamma: {args.gamma}; give 1 or more, or give no draft")
    # The cut is reported, which would mislead without drafts.
    gamma = args.gamma
    if args.draft or args.views:
        gamma = capped_gamma("--gamma", gamma, args.max_new_tokens)
    config = EngineConfig(
        views=None if args.views is None else view_names(args.views),
        weights=weights,
        weighting=args.weighting,
        gamma=gamma,
        tree=args.tree,
        width=args.width,
        batch_size=1,
        generation_config=args.scores.generation_config,
    )
    request = args.request()
    drafts = [locate(name, args.draft_revision) for name in args.draft]
    parts = mixture(config.views, [read_draft_config(path) for path in drafts])
    _check_drafts(args, parts)
    if parts.names:
        parse_weights(weights, len(parts.names))
    mesh = None if args.model_parallel == 1 else make_mesh(args.model_parallel)
    path = locate(args.target, args.revision)
    directories.read_config(path)

    how = {"dtype": args.computes_in, "tiles": args.tiles}
    progress(f"loading target {path}")
    target = LoadedModel.load(
        path, **how, mesh=mesh, weights=args.target_weights, adapter=args.adapter
    )
    reports, loaded = [f"target: {target.report}"], []
    for name in drafts:
        progress(f"loading draft {name}")
        images_rule = args.draft_images if is_head(name) else None
        loaded.append(draft := load_draft(name, target, **how, images=images_rule))
        reports += [f"draft: {draft.report}"] if isinstance(draft, LoadedModel) else []
    captioner = None
    if args.captioner is not None:
        progress(f"loading captioner {args.captioner}")
        captioner = load_captioner(args.captioner, args.computes_in, share_tower_with=target)
    clear()  # a warning of the engine's has a line of its own
    engine = Engine(target, loaded, config, captioner)

    def describe(result: Result) -> tuple[dict[str, Any], str]:
        names, block = engine.assembly.mixture.names, block_fields(config)
        block = block if names else dict.fromkeys(block) | {"gamma": 0}
        stats = acceptance_metrics([result.stats]) | block
        length = stats["tokens_per_pass"]
        stats["views"] = list(names) or None
        stats["weighting"] = str(parse_weighting(config.weighting)) if names else None
        return stats, f"{'-' if length is None else f'{length:.2f}'} tokens per target pass"

    answer(args, engine, request, describe, *reports)


def _check_drafts(args: Generate, parts: Mixture) -> None:
    """Raise InputError for options that nothing of a mixture reads."""
    listing = ",".join(parts.names)
    if not listing:
        _refuse(args, OF_DRAFTS, "needs a draft; give --draft, or leave it out")
    if not args.draft:
        _refuse(args, ["draft_revision"], "needs --draft with a hub id; give one, or leave it out")
    if parts.head is None:
        _refuse(args, ["draft_images"], "needs a head; give --draft, or leave it out")
    if len(parts.names) == 1:
        _refuse(
            args, ["weighting"], f"{listing} drafts alone; add --draft or --views, or leave it out"
        )
    reads = needs_captioner(parts.views, args.captioner)
    if args.captioner is not None:
        check_captioner(args.captioner)
        if not reads:
            raise InputError(f"--captioner: no view of {listing} shows captions; add C to --views")


def _refuse(args: Generate, names: Sequence[str], why: str) -> None:
    """Raise InputError for the first of these options that has another value than its default."""
    changed = [name for name in names if getattr(args, name) != getattr(Generate, name)]
    if changed:
        raise InputError(f"--{changed[0].replace('_', '-')}: {why}")
