"""Trains a draft by a recipe and writes it in Hugging Face layout.

    python -m train.recipe mini_text
    python -m train.recipe mini_large --data runs/data/my_mix --tune.steps 100
    python -m train.recipe llava15_68m --data llava_v1_5_mix665k=/data/mix --tune.accumulate 4
    python -m train.recipe pooled --view P36 --start mjbooo/lvlm68m

A recipe is a preset under configs/train/recipes; each of its stages takes the options of a TrainConfig after its name,
and a distillation its own: --distillation.divergence tvd.
A run that was stopped goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import jax
import tyro

from jaxspec.checkpoints import directories, huggingface
from jaxspec.command import input_errors, script_name
from jaxspec.errors import InputError, nearest
from jaxspec.presets import load_preset, preset_names
from jaxspec.runtime import join_cluster, parse_dtype, setup_runtime
from jaxspec.training.config import TrainConfig
from jaxspec.training.objectives import Distillation
from jaxspec.training.recipes import Recipe, parse_data, train_draft

KIND = "train.recipes"


@dataclass(frozen=True)
class Options:
    """What is asked for besides the stages."""

    target: str | None = None
    """Directory or hub id of the target; by default the recipe's."""
    start: str | None = None
    """Directory or hub id of what the draft starts as; by default the recipe's."""
    view: str | None = None
    """How the draft is shown prompts: M, T, P, P36 ...; by default the recipe's."""
    held_out: str | None = None
    """Data set of the target's own greedy answers, to simulate tokens per block on every `evaluate_every` steps."""
    data: tuple[str, ...] = ()
    """PATH of a prepared data set to train on instead of the recipe's; several are mixed alike. Or NAME=PATH, where one
    of the recipe's own lies, if not in runs/data."""
    buckets: tuple[int, ...] | None = None
    """Buckets of row lengths in tokens; longer rows are cut at the last; by default the recipe's."""
    runs: Path | None = None
    """Checkpoints and metrics go to RUNS/STAGE; by default runs/train/RECIPE."""
    out: Path | None = None
    """The finished draft, a Hugging Face directory; by default RUNS/hf."""
    dtype: str = "bfloat16"
    """Dtype of the finished draft's file."""
    cluster: str = ""
    """On several hosts `auto`, or HOST:PORT,COUNT,INDEX."""


def main(args: Sequence[str] | None = None) -> Path:
    """Trains the recipe's stages and exports the draft."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0].startswith("-"):
        known = ", ".join(preset_names(KIND))
        if {"-h", "--help"} & set(words):
            print(f"{__doc__}\nRecipes: {known}. Options of one: python -m train.recipe NAME --help")
            sys.exit(0)
        raise InputError(f"recipe: none is named; give one of {known} before the options")
    name, *rest = words
    recipe, options = _parse(name, load_preset(KIND, name), rest)
    stages, places = parse_data(options.data, recipe.stages, recipe.held_out)
    recipe = replace(recipe, stages=stages)
    dtype = parse_dtype(options.dtype)
    join_cluster(options.cluster)
    setup_runtime()
    runs = options.runs or Path("runs/train") / name
    out = options.out or runs / "hf"
    directories.check_output(out, *(runs / stage.name for stage in stages))
    draft = train_draft(recipe, runs, places)
    if jax.process_index() == 0:
        huggingface.save(
            out,
            draft.config,
            draft.params,
            tokenizer=draft.tokenizer,
            image_processor=draft.image_processor,
            dtype=dtype,
            overwrite=True,
        )
        print(f"wrote {out}")
    return out


def _parse(name: str, recipe: Recipe, args: Sequence[str]) -> tuple[Recipe, Options]:
    """The recipe with what the command line changes."""
    parts: list[Any] = [(stage.name, TrainConfig, field(default=stage.train)) for stage in recipe.stages]
    if recipe.distillation is not None:
        parts.append(("distillation", Distillation, field(default=recipe.distillation)))
    command: Any = make_dataclass("Command", parts, bases=(Options,), frozen=True)
    found, unknown = tyro.cli(command, prog=f"python -m train.recipe {name}", args=args, return_unknown_args=True)
    if unknown:
        known = [part.name for part in fields(Options)]
        known += [f"{name}.{part.name}" for name, kind, _ in parts for part in fields(kind)]
        options = [f"--{name}".replace("_", "-") for name in known]
        raise InputError(f"{unknown[0]}: no such option; {nearest(unknown[0], options)}")
    changed = {key: getattr(found, key) for key in ("target", "start", "view", "buckets", "held_out")}
    recipe = replace(
        recipe,
        stages=tuple(replace(stage, train=getattr(found, stage.name)) for stage in recipe.stages),
        distillation=getattr(found, "distillation", None),
        **{key: value for key, value in changed.items() if value is not None},
    )
    return recipe, Options(**{part.name: getattr(found, part.name) for part in fields(Options)})


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
