"""Train a draft model or a head by a recipe, and write its directory.

    python -m train.recipe mini_text
    python -m train.recipe mini_large --data runs/data/my_mix --tune.steps 100
    python -m train.recipe llava15_68m --data llava_v1_5_mix665k=/data/mix --tune.accumulate 4
    python -m train.recipe pooled --view P36 --start mjbooo/lvlm68m
    python -m train.recipe kv_mini_answers --head.pooling drop --anchoring.loss ce
    python -m train.recipe configs/train/recipes/kv_mini.py --dry-run
    python -m train.recipe coder_kv coder_eagle3 coder_dflash

A recipe is a preset under configs/train/recipes, or another file with a `config`. Each of its
stages takes the options of a TrainConfig after its name, and so does a distillation
(--distillation.divergence tvd). A stopped run goes on. Heads of recipes that differ in nothing else
learn together, by the same passes of the target.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.adapters import save_adapter
from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.locating import SMALL, locate, model_name
from jaxspec.checkpoints.orbax import forget
from jaxspec.cli.export import NEEDS_PUSH, OnHub
from jaxspec.cli.options import listing, paragraphs, parse_options
from jaxspec.cli.shared import refuse_set
from jaxspec.cluster import on_first
from jaxspec.command import input_errors, load_preset, preset_names, preset_texts, script_name
from jaxspec.errors import InputError
from jaxspec.heads.kinds.kv_head.config import KVHeadOptions
from jaxspec.heads.loading import save_head
from jaxspec.heads.making import Feature
from jaxspec.heads.states import ImageRule
from jaxspec.models.lora import merged
from jaxspec.publishing.export import Target, export
from jaxspec.publishing.model_card import Terms
from jaxspec.publishing.push import Repository, check_terms, push
from jaxspec.runtime import parse_dtype
from jaxspec.training.draft_recipe import Recipe, adapter_base, train_draft
from jaxspec.training.head_recipe import ALONE, HeadRecipe, train_heads
from jaxspec.training.loop.dry import dry_run
from jaxspec.training.loop.trainer import fit
from jaxspec.training.recipes import DataSets, StagedRecipe, with_data
from picturebook.training import named
from train.setup import begin, own_output

KIND = "train.recipes"


@dataclass(frozen=True)
class Options(OnHub):
    """Options in addition to those of the stages; None keeps the recipe's."""

    target: str | None = None
    """Directory or hub id of the target."""
    start: str | None = None
    """Directory or hub id of the draft's start, or of a head of the same kind to train on."""
    data: tuple[str, ...] = ()
    """PATH of a prepared data set to train on instead of the recipe's; several are mixed equally.
    Or NAME=PATH, the path of one of the recipe's own sets, if not in runs/data."""
    buckets: tuple[int, ...] | None = None
    """Buckets of row lengths in tokens; longer rows are cut at the last."""
    unlearned: float | None = None
    """Largest share of rows that teach nothing, because no answer is within the buckets."""
    system: str | None = None
    """System prompt before each conversation in Vicuna's form; '' writes none."""
    draft_vocabulary: int | None = None
    """Tokens that the draft scores, the most frequent of the answers; 0 keeps all."""
    held_out: str | None = None
    """Data set to evaluate on every `evaluate_every` steps. A draft model needs the target's greedy
    answers, on which tokens per pass are simulated. A head needs questions, which are decoded; the
    best head is kept."""
    runs: Path | None = None
    """Checkpoints and metrics go to RUNS/STAGE; by default runs/train/RECIPE."""
    out: Path | None = None
    """The finished model, a Hugging Face directory, or one of a head; by default RUNS/hf."""
    cluster: str = ""
    """On several hosts `auto`, or HOST:PORT,COUNT,INDEX."""
    dry_run: bool = False
    """Only say what each stage would take: rows that teach, slots filled, memory by device, steps,
    hours. Compiles two steps, and writes nothing."""
    debug: bool = False
    """Try the recipe out: two steps a stage, of as few samples as its mesh takes. Files go to
    runs/debug, and checkpoints to CHECKPOINTS.debug, which is removed at the end."""


@dataclass(frozen=True)
class DraftOptions(Options):
    """Options of a draft in addition to those of the stages."""

    view: str | None = None
    """View of the prompts: M, T, P, P36 ..."""
    dtype: str = "bfloat16"
    """Dtype of the finished draft's file."""


@dataclass(frozen=True)
class Ablation(KVHeadOptions):
    """Options of the recipe's head; see `new_head`."""

    feature: Feature = "none"
    """Input in addition to a token's embedding: none, as in AASD; last_hidden, the target's last
    hidden state; eagle1, the same for a head with keys of its own, such as EAGLE's and MSD's;
    fused, three of the target's hidden states (EAGLE-3); block, several hidden states as keys of a
    DFlash head; assistant, as in Gemma 4; or mtp, as in MiMo."""
    images: ImageRule = "placeholder"
    """Rule for what an EAGLE head reads at the slots of images: the placeholder's embedding; the
    image's embedding; only that, without the hidden state (unfused, as MSD); or zeros in place of
    the hidden state (zero)."""
    target_layers: tuple[int, ...] = ()
    """Numbers of layers, in order, after which the head reads hidden states. A fused head reads
    three, by default 2, n/2 and n-3 of a target's n layers, of which it needs seven. A block head
    by default reads as many as it has layers, from 2 to n-2."""
    layers: int = 1
    """Decoder layers."""
    width: int = 1024
    """Width of a new assistant's layers; other heads have their target's."""
    gamma: int = 5
    """Drafted tokens of a block in training; with 1 no block reads a token of its own."""
    parallel: bool = False
    """Draft a block in one pass of a KV head, with learned masks behind the newest token."""
    markov: int = 0
    """Rank of the matrix by which a parallel or block head corrects scores for the token before; 0
    has none."""
    window: int = 0
    """Newest tokens that the layers of a fused or block head read; 0 reads all."""
    anchored: bool = False
    """Let the newest token's slot of a block head score the first drafted token, as DSpark's."""


def main(args: Sequence[str] | None = None) -> Path | None:
    """Train the recipe's stages and write the draft model or the head; with --dry-run, neither."""
    arguments = list(sys.argv[1:] if args is None else args)
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            print(f"{paragraphs(__doc__ or '')}\n\n{listing(preset_texts(KIND))}")
            print("\npython -m train.recipe RECIPE --help lists the options of a recipe.")
            sys.exit(0)
        names = ", ".join(preset_names(KIND))
        raise InputError(f"recipe: missing; give one of {names} before the options")
    recipes, options = parse_all(arguments)
    paths: dict[str, Path] = {}
    for name, each in recipes.items():
        recipes[name], paths = with_data(each, options.data)
    recipe, *_ = recipes.values()
    sources: DataSets = {**paths, **drawn(recipe, paths)}
    dtype = parse_dtype(getattr(options, "dtype", "bfloat16"))
    runs = options.runs or Path("runs/train") / "+".join(recipes)
    repository, terms = destination(recipe, options)
    parts = tuple(recipes) if len(recipes) > 1 else ()
    runs, out = begin(runs, options.out, options.cluster, options.debug, parts)
    if options.debug:  # the batch of a trial depends on the devices of all processes
        recipes = {name: shortened(each) for name, each in recipes.items()}
        recipe, *_ = recipes.values()
    places = {name: out / name for name in parts} or {ALONE: out}
    checkpoints = [stage.train.checkpoints for stage in recipe.stages if options.debug]
    tried = list(filter(None, checkpoints))
    on_first(lambda: [forget(path) for path in tried])  # a killed trial leaves checkpoints
    run = dry_run if options.dry_run else fit
    if isinstance(recipe, HeadRecipe):
        named: Any = dict(zip(places, recipes.values(), strict=True))
        heads = train_heads(named, runs, sources, run)

        def write() -> None:
            for name, head in heads.items():
                note = own_output(places[name], runs)
                save_head(places[name], *head, overwrite=True, write_more=note)
    else:
        draft = train_draft(recipe, runs, sources, run)

        def write() -> None:
            params, images = draft.params, draft.image_processor
            if recipe.lora:
                adapter = draft.config, params, recipe.lora, adapter_base(recipe), dtype, images
                save_adapter(runs / "adapter", *adapter)
            huggingface.save(
                out,
                draft.config,
                merged(params, recipe.lora),
                huggingface.SaveOptions(dtype=dtype, overwrite=True),
                tokenizer=draft.tokenizer,
                image_processor=images,
                write_more=own_output(out, runs),
            )

    if options.dry_run:
        return None

    def finish() -> None:
        """Write the model, push it if asked, and forget a trial's checkpoints."""
        write()
        print(*(f"wrote {path}" for path in places.values()), sep="\n")
        if repository is not None:
            overwritten = huggingface.SaveOptions(overwrite=True)
            card_target = None  # a head's own files name its target
            if isinstance(recipe, Recipe):
                # With the draft's own configuration the export adds no token to its vocabulary.
                name = model_name(locate(recipe.target, files=SMALL))
                card_target = Target(name, read_config(out))
            export(out, repository.folder, target=card_target, options=overwritten, terms=terms)
            print(push(repository.folder, repository))
        for path in tried:
            forget(path)

    on_first(finish)
    return out


def parse_all(args: Sequence[str]) -> tuple[dict[str, Recipe | HeadRecipe], Any]:
    """Return recipes by their names, with what the command line changes in all of them.

    args: One recipe or more, each a preset's name or a path, and options.

    Raises InputError for several that are not of heads.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), args))
    stems = [Path(name).stem for name in names]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise InputError(f"{twice[0]}: given twice; give recipes of different names")
    recipes, options = {name: load_preset(KIND, name) for name in names}, args[len(names) :]
    several = len(recipes) > 1
    for name, recipe in recipes.items():
        if several and not isinstance(recipe, HeadRecipe):
            raise InputError(f"{name}: trains a draft model; give it alone")
    parsed = {name: parse(name, recipe, options, several) for name, recipe in recipes.items()}
    _, common = next(iter(parsed.values()))
    if several and common.push is not None:
        raise InputError(f"--push {common.push}: works only with one recipe; leave it out")
    return {Path(name).stem: recipe for name, (recipe, _) in parsed.items()}, common


def shortened(recipe: Recipe | HeadRecipe) -> Recipe | HeadRecipe:
    """Return the recipe with the stages of a trial."""
    stages = [replace(stage, train=stage.train.shortened()) for stage in recipe.stages]
    return replace(recipe, stages=tuple(stages))


def destination(
    recipe: Recipe | HeadRecipe, options: Options
) -> tuple[Repository | None, Terms | None]:
    """Return where the finished model is pushed to, and the terms of its card, before training."""
    repository, start = options.repository, recipe.target
    if repository is None:
        refuse_set(options, ["licence", "base_model"], NEEDS_PUSH)
        return None, None
    if options.debug:
        raise InputError(f"--push {options.push}: a trial is not pushed; leave out --debug or this")
    if isinstance(recipe, Recipe) and isinstance(recipe.start, str):
        start = recipe.start
    path = locate(start, files=SMALL)
    terms = Terms.of(path, options.licence, options.base_model)
    check_terms(path, terms)
    return repository, terms


def drawn(recipe: StagedRecipe, paths: Mapping[str, Path]) -> DataSets:
    """Return the picture book's samples for each of its names without a path of its own."""
    names = {name for stage in recipe.stages for name, _ in stage.data}
    pathless = [name for name in names if paths.get(name, Path(name)) == Path(name)]
    return {name: source for name in pathless if (source := named(name))}


def parse(
    name: str, recipe: StagedRecipe, args: Sequence[str], together: bool = False
) -> tuple[Recipe | HeadRecipe, Any]:
    """Return the recipe with what the command line changes.

    together: Leave out the options of the head, of several recipes.

    Raises InputError for a stage with the name of other options.
    """
    groups: dict[str, Any] = {}
    if isinstance(recipe, HeadRecipe) and not together:
        settings = {
            option.name: recipe.head[option.name]
            for option in fields(Ablation)
            if option.name in recipe.head
        }
        groups = {"head": Ablation(**settings), "anchoring": recipe.anchoring}
    elif isinstance(recipe, Recipe) and recipe.distillation is not None:
        groups = {"distillation": recipe.distillation}
    kind = DraftOptions if isinstance(recipe, Recipe) else Options
    parts = {stage.name: stage.train for stage in recipe.stages}
    if clashes := parts.keys() & {*groups, *(option.name for option in fields(kind))}:
        raise InputError(f"{name}: stage {min(clashes)!r} has the name of other options; rename it")
    columns: list[Any] = [
        (part, type(default), field(default=default)) for part, default in (parts | groups).items()
    ]
    command: Any = make_dataclass("Command", columns, bases=(kind,), frozen=True)
    program, stage = f"python -m train.recipe {name}", recipe.stages[-1].name.replace("_", "-")
    about = "" if name.endswith(".py") else preset_texts(KIND).get(name)
    examples = f"$ {program} --debug\n$ {program} --{stage}.steps 100 --runs runs/train/short"
    parsed = parse_options(command, args, program, f"{about}\n\n{examples}")
    options = kind(**{option.name: getattr(parsed, option.name) for option in fields(kind)})
    changed = {
        key: value
        for key, value in vars(options).items()
        if key in vars(recipe) and value is not None
    }
    changed |= {group: getattr(parsed, group) for group in groups}
    if isinstance(recipe, HeadRecipe) and groups:
        changed["head"] = {**recipe.head, **vars(parsed.head)}
        names = {
            word.partition("=")[0].removeprefix("--head.").removeprefix("no-").replace("-", "_")
            for word in args
            if word.startswith("--head.")
        }
        changed["chosen"] = tuple(name for name in vars(parsed.head) if name in names)
    stages = tuple(replace(stage, train=getattr(parsed, stage.name)) for stage in recipe.stages)
    return replace(recipe, stages=stages, **changed), options  # type: ignore[return-value]


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
