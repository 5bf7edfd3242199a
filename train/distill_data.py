"""Let a target answer a data set's questions, and prepare the answers for training.

    python -m train.distill_data --target llava-hf/llava-1.5-7b-hf --data runs/data/my_mix \\
        --name my_mix_t0
    python -m train.distill_data --target jaxspec_demo/mini/target --data picturebook \\
        --samples 20000 --draft jaxspec_demo/mini/draft --temperature 1 --name pages_t1

A stopped run goes on, and a finished one does nothing. On several machines that see one folder,
give --shard 0/4 to 3/4; when all are done, run shard 0 again to prepare the whole. On hosts that
compute together give --cluster instead. With --answers gs://BUCKET/NAME chunks go to a bucket, from
where another machine can continue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from etils import epath

from jaxspec.checkpoints.orbax import forget
from jaxspec.cli.options import run_script
from jaxspec.cluster import join_cluster, on_first, process
from jaxspec.data.prepared import Prepared, data_folder, prepare
from jaxspec.engine.config import LENGTH
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.errors import InputError
from jaxspec.files import forget_trial, local_path, trial_of
from jaxspec.loading.models import load_draft
from jaxspec.loading.pairs import check_drafts
from jaxspec.runtime import parse_dtype
from jaxspec.sharding import Placement
from jaxspec.training.loop.signatures import data_signature, model_signature
from jaxspec.training.regenerate import Regeneration, losses, regenerate, regenerated
from picturebook.training import named


@dataclass(frozen=True)
class Options(Placement):
    """Options of the questions and the answers."""

    target: str
    """Directory in Hugging Face layout, or hub id."""
    data: str
    """A folder of prepared data, or picturebook, or picturebook:describe,read for some kinds."""
    name: str
    """Name of the new data set: lower-case words joined by _."""
    samples: int | None = None
    """Number of samples, from the first on; all by default."""
    temperature: float = 0.0
    """0 is greedy; 1 shows a draft more of what the target may say."""
    max_new_tokens: int = 256
    """Longer answers are left out, with the turns after them."""
    keep_cut: bool = False
    """Keep the beginnings of longer answers, which training then reads as whole ones. This wastes
    fewer of the target's tokens if answers are long."""
    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Directory or hub id of a draft model or head, which saves time; the answers stay the
    target's. Repeat the option for a model and a head."""
    views: tuple[str, ...] | None = None
    """Views of the prompts that a draft model reads, then lookup; by default M."""
    batch_size: int = 16
    """Conversations at a time."""
    prompt_buckets: tuple[int, ...] = (256, 768, 1536, 4096)
    """Prompt lengths that programs are compiled for."""
    image_buckets: tuple[int, ...] = (0, 1, 2, 5, 10, 24)
    """Numbers of image tiles that programs are compiled for."""
    seed: int = 0
    """Seed of the drawn tokens, for temperatures above 0."""
    chunk: int = 256
    """Samples that are saved together."""
    shard: str = "0/1"
    """i/n: this run's part of the chunks."""
    dtype: str | None = None
    """Dtype of the computation; by default float32 on CPUs, else the files'."""
    out: Path = Path("runs/data")
    """Folder of prepared data sets."""
    answers: str = ""
    """Folder of the chunks; an address such as gs://bucket/NAME outlives a preempted slice. The
    default is OUT/NAME.answers."""
    debug: bool = False
    """Try the command out on the first four samples, into runs/debug."""


def main(options: Annotated[Options, tyro.conf.arg(name="")]) -> Path | None:
    """Answer the questions; prepare the whole when all are answered, and return its folder, which
    the first process writes.
    """
    shard = _shard(options.shard)
    join_cluster(options.cluster)
    source = named(options.data) or Prepared(local_path(options.data))
    if options.debug:
        few, answers = min(4, options.samples or 4), options.answers and f"{options.answers}.debug"
        options = replace(options, samples=few, out=trial_of(options.out), answers=answers)
        if shard[0] == process()[0] == 0:
            forget_trial(options.out / options.name)
            if answers:
                forget(answers)
    samples = len(source) if options.samples is None else min(options.samples, len(source))
    if samples > 10**9:
        raise InputError(f"data {options.data}: has no end; say how many with --samples")
    folder = epath.Path(options.answers or options.out / f"{options.name}.answers")
    prepared = data_folder(options.name, options.out)
    if prepared.exists() and not folder.exists():
        raise InputError(
            f"{prepared}: holds other data, that no answers here were made for; give another --name"
        )
    if prepared.exists():
        keeps = bool(Prepared(prepared).metadata.get("keep_cut"))
        if keeps != options.keep_cut:
            raise InputError(
                f"{prepared}: prepared with{'' if keeps else 'out'} --keep-cut; go on with that, "
                "or remove it to prepare the same answers anew"
            )
    precision = None if options.dtype is None else parse_dtype(options.dtype)
    work = Regeneration(
        model_signature(options.target),
        f"{options.data}, {data_signature(source)}",
        samples,
        options.temperature,
        options.max_new_tokens,
        options.seed,
        options.chunk,
    )
    config = EngineConfig(
        views=options.views,
        gamma=LENGTH,  # sampled answers depend on what was drafted
        batch_size=options.batch_size,
        prompt_buckets=options.prompt_buckets,
        image_buckets=options.image_buckets,
        new_buckets=(options.max_new_tokens,),
        generation_config="ignore",  # a draft learns the target's own distribution
    )
    check_drafts(options.target, options.draft)
    target = LoadedModel.load(options.target, precision, mesh=options.mesh(options.batch_size))
    drafts = [load_draft(name, target, precision) for name in options.draft]
    done = regenerate(Engine(target, drafts, config), source, work, folder, shard)

    def prepare_all() -> Path | None:
        """Prepare the whole when all are answered."""
        if shard[0] > 0 or done < work.chunks:
            print(
                f"{done} of {work.chunks} chunks are there; when all are, run shard 0 again to "
                f"prepare {options.name}"
            )
            return None
        if prepared.exists():
            print(f"{prepared} holds these answers already")
            return prepared
        lost, summary = losses(work, folder)
        answered = regenerated(source, work, folder, options.keep_cut)
        prepare(
            options.name,
            options.out,
            answered,
            metadata=lambda: vars(work) | lost | {"keep_cut": options.keep_cut},
            lost=lambda: summary,
        )
        where = "with" if options.keep_cut else "before"
        print(
            f"wrote {prepared}; {lost['cut']} conversations end {where} an answer of over "
            f"{work.max_new_tokens} tokens, {lost['refused']} before a question that the target "
            f"cannot be asked or does not answer (reasons are in {folder})"
        )
        return prepared

    # The others wait: JAX ends a process five minutes after another one has ended.
    return on_first(prepare_all)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise InputError(f"--shard: {text!r} is not i/n with i from 0 to n - 1, such as 0/4")
    return int(part), int(parts)


if __name__ == "__main__":
    run_script(main, __doc__)
