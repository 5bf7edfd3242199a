"""`jaxspec collaborate`: answer a prompt with several models that decode together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.shared import Ask, Loading, answer, numbers, progress, view_names
from jaxspec.engine.config import Method, capped_gamma
from jaxspec.engine.engine import CollaborationConfig, Engine, LoadedModel, Result
from jaxspec.engine.metrics import collaboration_metrics
from jaxspec.loading.pairs import check_group
from jaxspec.runtime import clear


@dataclass(frozen=True, kw_only=True)
class Models(Loading):
    """Choose the models, and how to load them."""

    models: str
    """Directories or hub ids of the models, comma-separated; repeats are allowed."""


@dataclass(frozen=True)
class Decoding:
    """Choose the distribution to decode from, and which models propose tokens."""

    combination: str = "weighted"
    """Distribution to decode from: weighted:0.6,0.4, contrastive:mu=0.1, contrastive:beta=0.5, or
    logits:1.5,-0.5."""
    method: Method = "alternating"
    """alternating: all models propose in turn (CoS's alternate proposals, APF). naive, speculative:
    one model proposes, the latter with a bonus token. standard: no proposals."""
    gammas: str | None = None
    """Draft length of each model, as 5,1; by default 1 each."""
    default_proposer: int | Literal["auto"] = 0
    """Index of the model that proposes first and after rejections, from 0. auto: the model
    with the largest ratio of weight to size, with the longest of --gammas; without weights the
    smallest model."""
    views: str | None = None
    """How each model sees images, comma-separated: M (in full), T (a line break for each), P
    (pooled). By default M, and T for text models."""


@dataclass(frozen=True)
class Collaborate:
    """Answer a prompt with several models of one vocabulary that decode collaboratively.

    $ jaxspec collaborate --image jaxspec_demo/page.png --prompt "What is here?" \\
        --models jaxspec_demo/mini/target,jaxspec_demo/mini/draft
    """

    models: Models
    decoding: Decoding
    ask: Annotated[Ask, tyro.conf.arg(name="")]


def run(args: Collaborate) -> None:
    """Print the answer; check options before any model is read."""
    models, decoding, ask = args.models, args.decoding, args.ask
    names = models.models.split(",")
    gammas = decoding.gammas and tuple(
        capped_gamma("--gammas", gamma, ask.output.max_new_tokens)
        for gamma in numbers("--gammas", decoding.gammas, int)
    )
    views = decoding.views and view_names(decoding.views)
    config = CollaborationConfig(
        combination=decoding.combination,
        method=decoding.method,
        gammas=gammas or None,
        default_proposer=decoding.default_proposer,
        views=views or None,
        batch_size=1,
        generation_config=ask.scores.generation_config,
    )
    config.checked(len(names))
    request = ask.request(models)
    paths = [locate(name) for name in names]
    ask.check_target(*map(read_config, paths))
    described = {path: LoadedModel.without_weights(path) for path in {*paths}}
    check_group([described[path] for path in paths])
    loaded: dict[Path, LoadedModel] = {}
    for path in paths:
        if path not in loaded:
            progress(f"loading {path}")
            loaded[path] = LoadedModel.load(
                path,
                models.computes_in,
                tiles=models.tiles,
                share_tower_with=next(iter(loaded.values()), None),
                weights=models.target_weights,
            )
    clear()
    engine = Engine([loaded[path] for path in paths], config=config)

    settings = engine.config
    assert isinstance(settings, CollaborationConfig)

    def describe(result: Result) -> tuple[dict[str, Any], str]:
        stats = collaboration_metrics([result.stats])
        calls = ", ".join(f"{n:.2f}" for n in stats["calls_per_token"] or ())
        stats |= {
            "combination": decoding.combination,
            "method": decoding.method,
            "gammas": settings.gammas or (1,) * len(names),
            "default_proposer": settings.default_proposer,
            "views": [form.view.name for form in engine.assembly.forms],
        }
        return stats, f"{calls} passes of each model a token"

    answer(ask, models, engine, request, describe)
