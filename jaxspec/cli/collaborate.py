"""`jaxspec generate --collaborate`: answers a prompt as several models do together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax

from jaxspec.checkpoints import directories
from jaxspec.cli.generate import ALONE, Generate, computes_in, encoded, refuse, request_of, told
from jaxspec.cli.terminal import progress, say
from jaxspec.data.images import load_image
from jaxspec.decoding.collaboration import Collaboration, CollaborationConfig
from jaxspec.decoding.engine_config import capped_gamma
from jaxspec.decoding.loading import LoadedModel
from jaxspec.errors import InputError
from jaxspec.evaluation.metrics import collaboration_metrics


def run(args: Generate) -> None:
    """Print the answer. All that can be checked without the models is checked before they are read."""
    assert args.collaborate is not None
    refuse(args, ALONE, "has no part in --collaborate, which names all models; leave it out")
    names = args.collaborate.split(",")
    config = CollaborationConfig(
        args.combine,
        args.method,
        None if args.gammas is None else _gammas(args.gammas, args.max_new_tokens),
        args.proposer,
        None if args.views is None else tuple(args.views.split(",")),
        batch_size=1,
    )
    config.checked(len(names))
    images = [load_image(path) for path in args.image]
    request = request_of(args)
    paths = [directories.locate(name) for name in names]
    dtype = computes_in(args)
    loaded: dict[Path, LoadedModel] = {}
    for path in paths:
        if path not in loaded:
            progress(f"loading {path}")
            first = next(iter(loaded.values()), None)
            loaded[path] = LoadedModel.load(path, dtype, tiles=args.tiles, beside=first, panels=args.panels)
    collaboration = Collaboration([loaded[path] for path in paths], config)
    request = replace(request, prompt=encoded(args, collaboration.encoder, images))
    say(collaboration.memory_report([request]))
    progress("compiling and decoding")
    result = collaboration.generate([request])[0]
    stats = {
        **collaboration_metrics([result.stats]),
        "combine": args.combine,
        "method": args.method,
        "gammas": config.gammas or (1,) * len(names),
        "proposer": args.proposer,
        "views": [view.name for view in collaboration.views],
        "prefill_ms": result.prefill_ms,
        "decode_tokens_per_second": 1e3 * result.stats.emitted / result.decode_ms,
        "temperature": request.temperature,
        "dtype": str(jax.tree.leaves(collaboration.lead.params)[0].dtype),
        "device": jax.devices()[0].device_kind,
        "batch": result.batch,
        "seed": request.seed,
    }
    calls = ", ".join(f"{n:.2f}" for n in stats["calls_per_token"] or ())
    pace = stats["decode_tokens_per_second"]
    say(f"done: {len(result.tokens)} tokens, {calls} passes of each model a token, {pace:.2f} tokens/s")
    print(told(args, result, stats))


def _gammas(text: str, max_new_tokens: int) -> tuple[int, ...]:
    try:
        given = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--gammas: {text!r} is no list of whole numbers; separate them by commas") from None
    return tuple(capped_gamma("--gammas", gamma, max_new_tokens) for gamma in given)
