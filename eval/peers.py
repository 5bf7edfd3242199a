"""Compare jaxspec with transformers on the same weights and prompts, in tokens per second.

    python -m eval.peers mini --out runs/peers_mini
    python -m eval.peers pair55m --new 128
    XLA_PYTHON_CLIENT_MEM_FRACTION=.45 python -m eval.peers llava7b_68m --prompts 2 --repeats 2
    python -m eval.peers smollm2 --compiled --draft runs/train/smollm2_text/hf
    python -m eval.peers coder --prompts 3 --repeats 1 --new 64

`mini` compares the shipped models on picturebook, `pair55m` a synthetic pair with random weights
and a given agreement, `llava7b_68m` the same in the sizes of LLaVA-1.5-7B and its draft of 68M in
float16, for a GPU whose memory both libraries share, `smollm2` SmolLM2-135M with the shipped KV
head, and with --draft also a text draft, on the demo's prompts, and `coder` Qwen2.5-Coder-1.5B with
its 0.5B sibling on the first prompts of four sets. Both libraries read the same files. All methods
run warm, in turns and prompt by prompt, those of `coder` library after library, since the weights
of both take 20 GB. A method's time is the least of its runs, summed over prompts. Needs torch (the
`parity` extra) and runs on one device. Writes results.json and table.md into --out; the same
command continues a stopped run.

On a shared machine compare CPU seconds with `--threads 1`, not wall-clock times: other processes
slow the wall clock, and waiting torch threads add CPU seconds.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from eval.lib.drafts.comparison import first_prompt
from eval.lib.drafts.config import set_places
from eval.lib.output.report import Run, results_folder
from eval.lib.output.tables import Record, Table, cell, grouped, has, number, percent, pivot
from eval.lib.questions.sets import evaluation_set
from eval.lib.standins.synthetic import synthetic_model
from eval.lib.times.peer_methods import (
    ASSISTED,
    EAGER,
    GAMMA,
    PLAIN,
    Method,
    jaxspec_methods,
    measure,
    transformers_methods,
)
from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.options import run_script
from jaxspec.command import load_preset
from jaxspec.engine.engine import Engine, LoadedModel
from jaxspec.errors import InputError, check_counts, nearest
from jaxspec.loading.models import LoadedDraft, load_draft
from jaxspec.models.families import text_params
from jaxspec.models.vocabulary import widened
from jaxspec.prompts.encoder import Prompt
from jaxspec.runtime import setup_runtime
from jaxspec_demo import ASSETS
from jaxspec_demo.command import CONTESTS
from jaxspec_demo.models import SMOLLM2

SYNTHETIC = {"pair55m": "float32", "llava7b_68m": "float16"}
"""Presets of `configs/latency` whose shapes synthetic pairs have, with their dtypes."""
CODER = "coder"
AGREEMENT = 0.7
"""Share of tokens that the synthetic draft predicts."""
Group = list[Callable[[], dict[str, Method]]]
"""Functions that load the methods of a library."""


def main(
    preset: Annotated[
        Literal["mini", "pair55m", "llava7b_68m", "smollm2", "coder"], tyro.conf.Positional
    ],
    out: Path = Path("runs/peers/PRESET"),
    target: str | None = None,
    draft: str | None = None,
    data: tuple[str, ...] = (),
    new: int = 96,
    prompts: int = 4,
    repeats: int = 5,
    compiled: bool = False,
    threads: int | None = None,
    debug: bool = False,
) -> None:
    """Time jaxspec and transformers on one pair.

    Args:
      preset: Pair of models, see above.
      out: Directory for results.json and table.md.
      target: Other files of coder's target: a hub id, a directory or a GGUF file.
      draft: The same of its draft; for smollm2 a text draft from `train.recipe smollm2_text`.
      data: NAME=PATH of local copies of coder's sets.
      new: Maximum new tokens of an answer.
      prompts: Number of prompts, of each set with coder; each is a batch of its own.
      repeats: Timed runs of every method on every prompt, after one warm-up run.
      threads: Threads of torch; None leaves the choice to torch.
      compiled: Add transformers' static cache with a compiled forward pass (a minute of warm-up).
      debug: Try the command out: one prompt, eight new tokens, one run, written to runs/debug.
    """
    options = dict(locals())
    if debug:
        new, prompts, repeats = min(8, new), 1, 1
    check_counts(prompts=prompts, repeats=repeats, threads=1 if threads is None else threads)
    if new < 2:
        raise InputError(f"new: {new}; give 2 or more, since prefill writes the first token")
    if draft is not None and preset not in ("smollm2", CODER):
        raise InputError(f"draft: {draft}; {preset} has its own draft, leave the option out")
    if (target or data) and preset != CODER:
        raise InputError(f"target and data: {preset} has its own; leave the options out")
    sets = load_preset("eval", CODER).sets
    for name in set_places(data):
        if name not in sets:
            raise InputError(f"data: unknown set {name!r}; {nearest(name, sets)}")
    if find_spec("torch") is None:
        raise InputError("peers: torch is not installed; pip install -e '.[parity]'")
    warm = 2 if preset == CODER else new
    timed = f"the least of {repeats} runs"
    with Run(preset, options, results_folder(out, preset, debug), timed) as run:
        setup_runtime()
        with tempfile.TemporaryDirectory() as folder:
            paths = pair_of(preset, target, draft, Path(folder))
            asked_prompts, groups = prepared(
                preset, paths, Path(folder), prompts, data, new, compiled, threads
            )
            below = notes(preset, len(asked_prompts), new, threads)
            run.restore()
            while groups:
                rows = timed_rows(run.rows, groups.pop(0), asked_prompts, new, repeats, warm)
                for prompt_rows in rows:
                    run.add(prompt_rows)
                    run.write(peers_table(preset, run.rows, below))
                del rows
                gc.collect()  # the weights of a group make room for the next


def timed_rows(
    measured: Sequence[Record],
    group: Group,
    prompts: Sequence[Prompt],
    new: int,
    repeats: int,
    warm: int,
) -> Iterator[list[Record]]:
    """Yield for each prompt a row of each method of a group of libraries, run by turns."""
    methods = {name: method for library in group for name, method in library().items()}
    for index, prompt in enumerate(tqdm(prompts, "peers", unit="prompt")):
        if any(has(measured, prompt=index, method=name) for name in methods):
            yield []
        else:
            times = measure(methods, prompt, new, repeats, warm)
            yield [{"prompt": index, "method": name} | vars(timed) for name, timed in times.items()]
            methods = {name: methods[name] for name in times}


def prepared(
    preset: str,
    paths: Sequence[Path],
    folder: Path,
    prompts: int,
    data: Sequence[str],
    new: int,
    compiled: bool,
    threads: int | None,
) -> tuple[list[Prompt], list[Group]]:
    """Return the prompts, and the groups of libraries whose methods run by turns."""
    target, *drafts = (LoadedModel.load(path, dtype_of(preset)) for path in paths)
    gammas, assistants, buckets = (GAMMA,), {"LLaVA": paths[-1]}, (32, 64, 128, 648 + 32)
    heads: list[LoadedDraft] = []
    if preset == "smollm2":
        heads = [load_draft(ASSETS / preset / "kv_head", target)]
        gammas, assistants = (2, 3, GAMMA), {}
    if preset == CODER:
        gammas, assistants, buckets = (3, GAMMA), {}, (128, 256, 384)
    for draft in drafts:
        assistants["text"] = folder / "text_draft"
        config, params = widened(draft.model.text, text_params(draft.config, draft.params))
        huggingface.save(assistants["text"], config, params, tokenizer=draft.tokenizer)
    bare, dtype = replace(target, params={}), str(dtype_of(preset))
    libraries = [
        partial(jaxspec_methods, target, [*heads, *drafts], gammas, new, buckets),
        partial(transformers_methods, bare, paths[0], assistants, gammas, dtype, compiled, threads),
    ]
    groups = [[library] for library in libraries] if preset == CODER else [libraries]
    return prompts_of(preset, target, prompts, data), groups


def notes(preset: str, prompts: int, new: int, threads: int | None) -> list[str]:
    """Return the sentences below the table."""
    lines = [
        f"{prompts} prompts, batch 1, at most {new} new tokens, greedy, {dtype_of(preset)}, "
        f"{jax.devices()[0].device_kind}; threads of torch: {threads or 'its own choice'}.",
        "x: tokens/s over transformers' eager, and over the fastest of its lines with an "
        f"assistant, which drafts {GAMMA} tokens if no gamma is named. tok/s: of whole calls, from "
        "prepared inputs to the last token. decode: without the first token and the target's "
        "prefill; jaxspec's also excludes the draft's prefill and the host's time, which both "
        "count in assisted generation.",
        "CPU ms: of all threads, prefill included. Target calls count prefill. Same tokens: equal "
        "to jaxspec's plain decoding. -: the base of the comparison failed, or there is no draft.",
    ]
    if preset == CODER:
        lines.append("Library after library, not by turns.")
    elif preset != "smollm2":
        lines.append(
            "The LLaVA draft of transformers 5 never sees the image (its `generate` drops the "
            "pixels of the assistant)."
        )
    if preset in SYNTHETIC:
        lines.append(
            f"SYNTHETIC agreement: the draft is right after {AGREEMENT:.0%} of the tokens."
        )
    return lines


def summaries(rows: Sequence[Record]) -> list[Record]:
    """Return a row for each method that ran on all prompts."""
    prompts = {row["prompt"] for row in rows}
    groups = grouped(rows, itemgetter("method"))
    whole = {name: answers for name, answers in groups.items() if len(answers) == len(prompts)}
    return [summary(name, answers, whole.get(PLAIN)) for name, answers in whole.items()]


def peers_table(preset: str, rows: Sequence[Record], notes: Sequence[str] = ()) -> Table:
    """Return a line per method; a ratio is `-` if the method that it compares with failed."""
    groups = summaries(rows)

    def over(base: str, rate: str) -> Callable[[Record], str]:
        rates = [row[rate] for row in groups if row["method"].startswith(base)]
        return lambda row: number(row[rate] / max(rates) if rates else None)

    columns = {
        "tok/s": cell("tokens_per_second", number, 1),
        "x eager": over(EAGER, "tokens_per_second"),
        "x assisted": over(ASSISTED, "tokens_per_second"),
        "decode tok/s": cell("decode_tokens_per_second", number, 1),
        "decode x eager": over(EAGER, "decode_tokens_per_second"),
        "decode x assisted": over(ASSISTED, "decode_tokens_per_second"),
        "CPU ms / token": cell("cpu_ms_per_token", number),
        "tokens / target call": cell("tokens_per_target_call", number),
        "same tokens": cell("token_identity_rate", percent),
    }
    lines = [((row["method"],), row) for row in groups]
    return pivot(f"Peers on {preset}", ("method",), lines, columns, notes=notes)


def dtype_of(preset: str) -> jnp.dtype:
    """Return the dtype of both libraries' weights."""
    return jnp.dtype(SYNTHETIC.get(preset, "float32"))


def pair_of(preset: str, target: str | None, draft: str | None, folder: Path) -> tuple[Path, ...]:
    """Return the directories of target and drafts; write a synthetic pair to `folder`."""
    if preset == CODER:
        coder = load_preset("eval", CODER)
        return locate(target or coder.target), locate(draft or coder.draft[0])
    if preset == "smollm2":
        return (locate(SMOLLM2), *([] if draft is None else [locate(draft)]))
    if preset == "mini":
        return ASSETS / "mini" / "target", ASSETS / "mini" / "draft"
    paths = folder / "target", folder / "draft"
    for path, name in zip(paths, ("synthetic:target", f"synthetic:draft:{AGREEMENT}")):
        model = synthetic_model(name, dtype_of(preset), preset)
        saved = {"tokenizer": model.tokenizer, "image_processor": model.image_processor}
        options = huggingface.SaveOptions(overwrite=True)
        huggingface.save(path, model.config, model.params, options, **saved)
    return paths


def prompts_of(
    preset: str, target: LoadedModel, count: int, data: Sequence[str] = ()
) -> list[Prompt]:
    """Return the first prompts of coder's sets, the demo's prompts, descriptions of pages, or
    prompts of 648 tokens of noise.
    """
    encoder = Engine(target).encoder
    if preset == CODER:
        coder = load_preset("eval", CODER)
        coder = replace(coder, data=(*coder.data, *data), limit=count)
        samples = map(coder.samples, coder.sets)
        return [first_prompt(encoder, sample) for part in samples for sample in part]
    if preset == "smollm2":
        return [encoder.prompt(text, ()) for text in CONTESTS[preset].prompts[:count]]
    if preset == "mini":
        return [first_prompt(encoder, sample) for sample in evaluation_set("describe", count)]
    rng = np.random.default_rng(0)
    config: Any = target.config
    page = 2 * [config.vision_config.image_size]
    prompts = []
    for _ in range(count):  # BOS, an image of 576 tokens, and 71 tokens of text
        text = rng.integers(300, config.text_config.vocab_size - 1, 71)
        tokens = np.asarray([1, config.image_token_index, *text], np.int32)
        prompts.append(Prompt(tokens, (rng.integers(0, 255, (*page, 3), dtype=np.uint8),)))
    return prompts


def summary(name: str, runs: list[Record], reference: list[Record] | None) -> Record:
    """Return rates over all prompts; identity is None without a reference."""

    def total(field: str) -> float:
        return sum(run[field] for run in runs)

    answers = [list(run["tokens"]) for run in runs]
    count, same = sum(map(len, answers)), None
    if reference is not None:
        pairs = zip(answers, reference, strict=True)
        same = float(np.mean([answer == list(other["tokens"]) for answer, other in pairs]))
    return {
        "method": name,
        "tokens": count,
        "tokens_per_second": count / total("seconds"),
        "decode_tokens_per_second": (count - len(runs)) / total("decode_seconds"),
        "cpu_ms_per_token": 1e3 * total("cpu_seconds") / count,
        "tokens_per_target_call": count / total("target_calls"),
        "token_identity_rate": same,
    }


if __name__ == "__main__":
    run_script(main, __doc__)
