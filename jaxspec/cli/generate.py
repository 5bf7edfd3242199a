"""`jaxspec generate`: answers a prompt about images as one model would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.ask import Ask, answer, numbers, progress
from jaxspec.decoding.captioners import check_captioner, load_captioner
from jaxspec.decoding.drafters import ContextPolicy
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Result
from jaxspec.decoding.engine_config import capped_gamma
from jaxspec.decoding.metrics import acceptance_metrics, block_fields
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.prompts.views import needs_captioner, parse_views
from jaxspec.sharding import make_mesh


@dataclass(frozen=True, kw_only=True)
class Generate(Ask):
    """Answers a prompt about images as the target would; a draft makes it faster, never different."""

    target: str
    """Directory in Hugging Face layout, or hub id, of an LVLM (LLaVA-1.5, -NeXT,
    -OneVision) or a text model (Llama, Mistral, Qwen2, OPT)."""
    draft: str | None = None
    """Directory or hub id of a small LLaVA or text model with the target's tokeniser, or directory of a KV head made
    for the target; without, plain decoding."""
    kv_head: str | None = None
    """Directory of a KV head that drafts beside the draft, as the view kv."""
    views: str | None = None
    """How the draft is shown the prompt, comma-separated: M (as is; the default), T (text only), C (captions for
    images), P (image tokens pooled to a quarter), P36 (pooled to 36), the variants T-literal, T-special, P-1d,
    P-after, and last kv, a KV head."""
    captioner: str | None = None
    """For view C: jax:DIR (any LVLM that --target takes), florence2:ID, blip:ID or file:CAPTIONS.jsonl."""
    weights: str | None = None
    """Weight of each view, comma-separated; uniform by default."""
    weighting: str = "static"
    """How weights learn from what the target verified: static; mt-paper and mtcp-paper (MT* and MTCP* as TABED writes
    them); mt-release (both as its code runs them: a grid), mtcp-release (its code's inverse KL); or a rule with its
    options, as grid:window=16,measure=tvd."""
    gamma: int = 5
    """Drafted tokens a block; of a tree, on its longest path."""
    tree: str | None = None
    """Draft a tree, not a chain: 2 (children of every node), 2:32 (cut to 32 nodes), chains:2, or dynamic:4:24."""
    adaptive_gamma: bool = False
    """Draft up to --gamma tokens a block, as many as pay on this device, and none where no draft does."""
    context: ContextPolicy = "extrapolate"
    """A view longer than the draft was trained for: draft on, give it weight 0, or refuse."""
    revision: str | None = None
    """Branch, tag or commit of the target, where that is a hub id."""
    draft_revision: str | None = None
    """Branch, tag or commit of the draft, where that is a hub id."""
    model_parallel: int = 1
    """Devices that the target is split over; the draft is on each."""


OF_DRAFTS = (
    "views",
    "captioner",
    "weights",
    "weighting",
    "gamma",
    "tree",
    "adaptive_gamma",
    "context",
)
"""Options that are about a draft or a KV head."""


def run(args: Generate) -> None:
    """Print the answer. All that can be checked without the models is checked before they are read."""
    weights = None if args.weights is None else numbers("--weights", args.weights)
    draft, head = args.draft, args.kv_head
    if draft is not None and head is None and is_kv_head(draft):
        draft, head = None, draft
    default = ["kv"] if draft is None else ["M", "kv"]
    views = tuple(args.views.split(",") if args.views is not None else default if head else ["M"])
    config = EngineConfig(
        views,
        weights,
        args.weighting,
        capped_gamma("--gamma", args.gamma, args.max_new_tokens),
        args.tree,
        adaptive_gamma=args.adaptive_gamma,
        context=args.context,
        batch_size=1,
    )
    _check_drafts(args, draft, head, views)
    images, request = args.pictures(), args.request()
    mesh = None if args.model_parallel == 1 else make_mesh(args.model_parallel)
    models = [(args.target, args.revision)] + (
        [] if draft is None else [(draft, args.draft_revision)]
    )
    paths = [locate(*model) for model in models]
    for path in paths:
        directories.read_config(path)

    dtype = args.computes_in
    loaded: list[LoadedModel] = []
    for name, path, place in zip(("target", "draft"), paths, (mesh, None)):
        progress(f"loading {name} {path}")
        first = loaded[0] if loaded else None
        model = LoadedModel.load(path, dtype, tiles=args.tiles, share_tower_with=first, mesh=place)
        loaded.append(model)
    if head is not None:
        loaded[0] = loaded[0].with_head(head)
    captioner = None
    if args.captioner is not None:
        progress(f"loading captioner {args.captioner}")
        captioner = load_captioner(args.captioner, dtype, share_tower_with=loaded[0])
    engine = Engine(*loaded, config=config, captioner=captioner)

    def describe(result: Result) -> dict[str, Any]:
        drafts, block = isinstance(engine.program, Speculator), block_fields(config)
        stats = acceptance_metrics([result.stats]) | (
            block if drafts else dict.fromkeys(block) | {"gamma": 0}
        )
        length = stats["mean_acceptance_length"]
        return stats | {
            "views": list(views) if drafts else None,
            "weighting": str(parse_weighting(config.weighting)) if drafts else None,
            "told": f"{'-' if length is None else f'{length:.2f}'} tokens per target pass",
        }

    reports = (f"{name}: {model.report}" for name, model in zip(("target", "draft"), loaded))
    answer(args, engine, request, images, describe, *reports)


def _check_drafts(
    args: Generate, draft: str | None, head: str | None, views: tuple[str, ...]
) -> None:
    """Raise InputError for drafts that draft nothing, and for options that are about none."""
    if draft is None and head is None:
        _refuse(args, OF_DRAFTS, "is about a draft, and none is given; give --draft")
    if draft is None:
        _refuse(args, ["draft_revision"], "is of a hub id, and --draft is none; leave it out")
    if ("kv" in views) != (head is not None):
        what = (
            "--kv-head is given and they have no view kv"
            if head
            else "kv is a KV head; give --kv-head"
        )
        raise InputError(f"--views: {','.join(views)}: {what}")
    if draft is not None and views == ("kv",):
        raise InputError(
            "--draft: is shown nothing, as the only view is kv; leave it out, or name another view too"
        )
    reads = needs_captioner(parse_views(views), args.captioner)
    if args.captioner is not None:
        check_captioner(args.captioner)
        if not reads:
            raise InputError(
                f"--captioner: no view of {','.join(views)} shows captions; name C, or leave it out"
            )


def _refuse(args: Generate, names: Sequence[str], why: str) -> None:
    """Raise InputError for an option of these names that is not left as it was: nothing would read it."""
    given = [name for name in names if getattr(args, name) != getattr(Generate, name)]
    if given:
        raise InputError(f"--{given[0].replace('_', '-')}: {why}")
