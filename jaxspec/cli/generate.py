"""`jaxspec generate`: answers a prompt about images, as one model would, or as several do together."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.cli.terminal import Compiles, progress, say, show
from jaxspec.data.images import load_image
from jaxspec.data.prompts import Prompt, PromptEncoder, place_images
from jaxspec.decoding.captioners import check_captioner, load_captioner
from jaxspec.decoding.collaboration import Method
from jaxspec.decoding.drafters import ContextPolicy
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.decoding.engine_config import capped_gamma
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.views import needs_captioner, parse_views
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.evaluation.metrics import acceptance_metrics, block_fields
from jaxspec.sharding import make_mesh


@dataclass(frozen=True)
class Generate(Compiles):
    """Answers a prompt about images as the target would; a draft makes it faster, never different. Or answers it as
    several models do together (--collaborate)."""

    prompt: str
    """The question. Images stand where it says <image>, or in front of it if it says so nowhere."""
    target: str | None = None
    """Directory in Hugging Face layout, or hub id, of an LVLM (LLaVA-1.5, -NeXT,
    -OneVision) or a text model (Llama, Mistral, Qwen2, OPT)."""
    raw: bool = False
    """Give the model the prompt as it is, without a chat template: for base models."""
    draft: str | None = None
    """Directory or hub id of a small LLaVA or text model with the target's tokeniser, or directory of a KV head made
    for the target; without, plain decoding."""
    kv_head: str | None = None
    """Directory of a KV head that drafts beside the draft, as the view kv."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """An image file; give the option once an image, in order."""
    tiles: bool = True
    """Without, a LLaVA-NeXT reads one page an image, as LLaVA-1.5 does: so the released TABED code ran it."""
    views: str | None = None
    """How the draft is shown the prompt, comma-separated: M (as is; the default), T (text only), C (captions for
    images), P (image tokens pooled to a quarter), P36 (pooled to 36), the variants T-literal, T-special, P-1d,
    P-after, and last kv, a KV head. With --collaborate, how each model is."""
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
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0, from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this mass."""
    max_new_tokens: int = 128
    seed: int = 0
    """Seed of the drawn tokens, for temperatures above 0."""
    context: ContextPolicy = "extrapolate"
    """A view longer than the draft was trained for: draft on, give it weight 0, or refuse."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What both models compute in; by default float32 on CPUs, else what their files hold."""
    revision: str | None = None
    """Branch, tag or commit of the target, where that is a hub id."""
    draft_revision: str | None = None
    """Branch, tag or commit of the draft, where that is a hub id."""
    panels: bool = True
    """On CPUs, where it makes blocks faster, hold the decoders a second time in another layout."""
    model_parallel: int = 1
    """Devices that the target is split over; the draft is on each."""
    collaborate: str | None = None
    """Instead of --target and --draft: directories or hub ids of models that write together, comma-separated."""
    combine: str = "weighted"
    """With --collaborate, what they write from: weighted:0.6,0.4, contrastive:mu=0.1, contrastive:beta=0.5, or
    logits:1.5,-0.5."""
    method: Method = "alternating"
    """With --collaborate, who proposes: all by turns, one model (naive; speculative, with a bonus token), or none."""
    gammas: str | None = None
    """With --collaborate, the draft length of each model, as 5,1; by default 1 each."""
    proposer: int = 0
    """With --collaborate, which model proposes first and after rejections, from 0."""
    stream: bool = True
    """On a terminal, print the answer while it is written; --json and --collaborate print it whole."""
    json: bool = False
    """Print one JSON object with text, tokens and stats instead of the text."""


OF_DRAFTS = ("captioner", "weights", "weighting", "gamma", "tree", "adaptive_gamma", "context")
"""Options that are about a draft or a KV head, as --views is without --collaborate."""
ALONE = ("target", "draft", "kv_head", "revision", "draft_revision", "model_parallel", *OF_DRAFTS)
"""Options of one target."""
TOGETHER = ("combine", "method", "gammas", "proposer")
"""Options of --collaborate."""


def refuse(args: Generate, names: Sequence[str], why: str) -> None:
    """Raises InputError for an option of these names that is not left as it was: nothing would read it."""
    given = [name for name in names if getattr(args, name) != getattr(Generate, name)]
    if given:
        raise InputError(f"--{given[0].replace('_', '-')}: {why}")


def run(args: Generate) -> None:
    """Print the answer. All that can be checked without the models is checked before they are read."""
    refuse(args, TOGETHER, "is about models that write together; name them with --collaborate")
    if args.target is None:
        raise InputError("--target: no model is named; give a directory or hub id, or several with --collaborate")
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
    images = [load_image(path) for path in args.image]
    request = request_of(args)
    mesh = None if args.model_parallel == 1 else make_mesh(args.model_parallel)
    models = [(args.target, args.revision)] + ([] if draft is None else [(draft, args.draft_revision)])
    paths = [directories.locate(*model) for model in models]
    for path in paths:
        directories.read_config(path)

    dtype = computes_in(args)
    loaded: list[LoadedModel] = []
    for name, path, place in zip(("target", "draft"), paths, (mesh, None)):
        progress(f"loading {name} {path}")
        first = loaded[0] if loaded else None
        model = LoadedModel.load(path, dtype, tiles=args.tiles, beside=first, mesh=place, panels=args.panels)
        loaded.append(model)
    if head is not None:
        loaded[0] = loaded[0].with_head(head)
    captioner = None
    if args.captioner is not None:
        progress(f"loading captioner {args.captioner}")
        captioner = load_captioner(args.captioner, dtype, beside=loaded[0])
    engine = Engine(*loaded, config=config, captioner=captioner)
    request = replace(request, prompt=encoded(args, engine.encoder, images))
    memory = engine.memory_report([request])
    for name, model in zip(("target", "draft"), loaded):
        say(f"{name}: {model.report}")
    say(memory)
    progress("compiling and decoding")
    streams = args.stream and not args.json and sys.stdout.isatty()
    result = show(engine.stream(request)) if streams else engine.generate(request)
    stats = describe(result, request, engine)
    pace = stats["mean_acceptance_length"], stats["decode_tokens_per_second"]
    per_pass, per_second = ("-" if value is None else f"{value:.2f}" for value in pace)
    say(f"done: {len(result.tokens)} tokens, {per_pass} tokens per target pass, {per_second} tokens/s")
    if not streams:
        print(told(args, result, stats))


def _check_drafts(args: Generate, draft: str | None, head: str | None, views: tuple[str, ...]) -> None:
    """Raises InputError for drafts that draft nothing, and for options that are about none."""
    if draft is None and head is None:
        refuse(args, ("views", *OF_DRAFTS), "is about a draft, and none is given; give --draft")
    if draft is None:
        refuse(args, ["draft_revision"], "is of a hub id, and --draft is none; leave it out")
    if ("kv" in views) != (head is not None):
        what = "--kv-head is given and they have no view kv" if head else "kv is a KV head; give --kv-head"
        raise InputError(f"--views: {','.join(views)}: {what}")
    if draft is not None and views == ("kv",):
        raise InputError("--draft: is shown nothing, as the only view is kv; leave it out, or name another view too")
    reads = needs_captioner(parse_views(views), args.captioner)
    if args.captioner is not None:
        check_captioner(args.captioner)
        if not reads:
            raise InputError(f"--captioner: no view of {','.join(views)} shows captions; name C, or leave it out")


def describe(result: Result, request: Request, engine: Engine) -> dict[str, Any]:
    """The statistics of one request under the names of the project's records."""
    drafts = isinstance(engine.program, Speculator)
    block = block_fields(engine.config)
    return (
        acceptance_metrics([result.stats])
        | (block if drafts else dict.fromkeys(block) | {"gamma": 0})
        | {
            "caption_ms": result.caption_ms,
            "prefill_ms": result.prefill_ms,
            "decode_tokens_per_second": 1e3 * result.stats.emitted / result.decode_ms,
            "views": list(engine.config.views) if drafts else None,
            "weighting": str(parse_weighting(engine.config.weighting)) if drafts else None,
            "temperature": request.temperature,
            "dtype": str(jax.tree.leaves(engine.target.params)[0].dtype),
            "device": jax.devices()[0].device_kind,
            "batch": result.batch,
            "seed": request.seed,
        }
    )


def request_of(args: Generate) -> Request:
    """The checked request, with a prompt to be replaced as soon as there is a tokeniser."""
    place_images(args.prompt, len(args.image))
    return Request(
        Prompt(np.zeros(0, np.int32)), args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed
    )


def computes_in(args: Generate) -> jnp.dtype | None:
    """The dtype of all models; None is what `LoadedModel.load` takes by itself."""
    return args.dtype and jnp.dtype(args.dtype)


def encoded(args: Generate, encoder: PromptEncoder, images: Sequence[Any]) -> Prompt:
    """The prompt as token ids, with the models' template or without."""
    return encoder.raw(args.prompt, images) if args.raw else encoder.prompt(args.prompt, images)


def told(args: Generate, result: Result[Any], stats: dict[str, Any]) -> str:
    """The answer as the command prints it."""
    if args.json:
        return json.dumps({"text": result.text, "tokens": result.tokens, "stats": stats})
    return result.text


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option}: {text!r} is no list of numbers; separate them by commas") from None
