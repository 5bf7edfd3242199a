"""jaxspec and transformers on the same weights and prompts: tokens a second and a call.

    python -m eval.peers mini --out runs/peers_mini
    python -m eval.peers pair55m --new 128
    python -m eval.peers smollm2 --compiled --draft runs/train/smollm2_text/hf

`mini` are the shipped models on picturebook; `pair55m` a synthetic pair, of random weights and
given agreement; `smollm2` is SmolLM2-135M with the shipped KV head, and with a text draft where one
is given, on the demo's prompts. Both libraries read the same files. All methods run warm and in
turns, prompt by prompt; a method's time is the least of its runs, summed over prompts. Needs torch
(the `parity` extra). Writes results.json and table.md into --out; the same command goes on where
one was stopped. There is no mesh and no --cluster: transformers' `generate` is compared on one
device.

On a shared machine wall-clock says little: see the processor's seconds, with `--threads 1`, so that
torch's threads do not wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from eval.lib.comparison import first_prompt
from eval.lib.report import Run, results_folder
from eval.lib.sets import evaluation_set
from eval.lib.synthetic import synthetic_model
from eval.lib.tables import Record, Table
from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.gguf_files import SMOLLM2
from jaxspec.checkpoints.locating import locate
from jaxspec.cli.demo import CONTESTS
from jaxspec.command import run_script
from jaxspec.config import text_config
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError, check_counts
from jaxspec.files import ASSETS
from jaxspec.models import text_params
from jaxspec.models.vocabulary import widened
from jaxspec.prompts.encoder import Prompt
from jaxspec.runtime import setup_runtime

GAMMA = 5
PLAIN, EAGER, ASSISTED = "jaxspec plain", "transformers eager", "transformers assisted"
HEADER = [
    "method",
    "tok/s",
    "x eager",
    "x assisted",
    "decode tok/s",
    "decode x eager",
    "decode x assisted",
]
HEADER += ["CPU ms / token", "tokens / target call", "same tokens"]


@dataclass(frozen=True)
class Timed:
    """One prompt's answer by one method."""

    tokens: tuple[int, ...]
    seconds: float
    """From prepared inputs to the last token."""
    decode_seconds: float
    """The same less prefill."""
    cpu_seconds: float
    """Time of all the process's threads, prefill included."""
    target_calls: int
    """Forward passes of the target, prefill included."""


Method = Callable[[Prompt], Timed]


def main(
    preset: Annotated[Literal["mini", "pair55m", "smollm2"], tyro.conf.Positional],
    out: Path = Path("runs/peers/PRESET"),
    draft: Path | None = None,
    new: int = 96,
    prompts: int = 4,
    repeats: int = 5,
    acceptance: float = 0.7,
    compiled: bool = False,
    threads: int | None = None,
    debug: bool = False,
) -> None:
    """Times jaxspec and transformers on one pair.

    Args:
      preset: mini, pair55m or smollm2, see above.
      out: directory for results.json and table.md.
      draft: a text draft of SmolLM2, as `train.recipe smollm2_text` writes it; only for smollm2.
      new: most new tokens of an answer.
      prompts: prompts, one after the other, batch 1.
      repeats: runs of every method on every prompt, after one that is not counted.
      acceptance: share of the cycle that the synthetic draft knows; only for pair55m.
      threads: of torch; its own choice when None.
      compiled: also transformers' static cache with a compiled forward pass (a minute of warm-up).
      debug: try the command out: one prompt, eight new tokens, one run, into runs/debug. All else
        is as it would be.
    """
    given = dict(locals())
    if debug:
        new, prompts, repeats = min(8, new), 1, 1
    if find_spec("torch") is None:
        raise InputError("peers: torch is not installed; pip install -e '.[parity]'")
    check_counts(new=new, prompts=prompts, repeats=repeats)
    if draft is not None and preset != "smollm2":
        raise InputError(f"draft: {draft}; {preset} has a draft of its own, leave it out")
    with Run(preset, given, results_folder(out, preset, debug)) as run:
        setup_runtime()
        with tempfile.TemporaryDirectory() as folder:
            if preset == "smollm2":
                pair, gammas = (locate(SMOLLM2), *([] if draft is None else [draft])), (2, 3, GAMMA)
            else:
                shipped = ASSETS / "mini" / "target", ASSETS / "mini" / "draft"
                pair = shipped if preset == "mini" else write_pair(Path(folder), acceptance)
                gammas = (GAMMA,)
            target, *drafts = (LoadedModel.load(each, jnp.dtype("float32")) for each in pair)
            if preset == "smollm2":
                target = target.with_head(ASSETS / preset / "kv_head")
                asked = [
                    Engine(target).encoder.prompt(text, ())
                    for text in CONTESTS[preset].prompts[:prompts]
                ]
            else:
                asked = (
                    mini_prompts(target, prompts)
                    if preset == "mini"
                    else random_prompts(target, prompts)
                )
            assistants = {} if preset == "smollm2" else {"LLaVA": pair[1]}
            for model in drafts:
                assistants["text"] = Path(folder) / "text_draft"
                config, own = widened(model.model.text, text_params(model.config, model.params))
                huggingface.save(assistants["text"], config, own, tokenizer=model.tokenizer)
            methods = ours(target, drafts, gammas, new)
            methods |= theirs(target, pair[0], assistants, gammas, new, compiled, threads)
            below = notes(preset, len(asked), new, repeats, threads, acceptance)
            run.restore(("prompt",))
            done = {row["prompt"] for row in run.rows}
            for number, prompt in enumerate(tqdm(asked, "peers", unit="prompt")):
                if number not in done:
                    found = measure(methods, prompt, repeats)
                    run.add(
                        [
                            {"prompt": number, "method": name} | vars(timed)
                            for name, timed in found.items()
                        ],
                        [],
                    )
                    methods = {name: methods[name] for name in found}
                run.write(Table(f"Peers on {preset}", HEADER, cells(summaries(run.rows)), below))


def notes(
    preset: str, prompts: int, new: int, repeats: int, threads: int | None, acceptance: float
) -> list[str]:
    """Return the sentences below the table."""
    lines = [
        f"{prompts} prompts, batch 1, at most {new} new tokens, greedy, float32, "
        f"{jax.devices()[0].device_kind}; least of {repeats} runs; load {os.getloadavg()[0]:.1f} "
        "on "
        f"{os.cpu_count()} cores; threads of torch: {threads or 'its own choice'}.",
        "x: tokens/s over transformers' eager, and over the fastest of its lines with an "
        "assistant, which drafts "
        f"{GAMMA} tokens where no J is named. "
        "tok/s: of whole calls, from prepared inputs to the last token. decode: without the first "
        "token and the "
        "target's prefill; jaxspec's is also without the draft's prefill and the host's time, "
        "which both count in "
        "assisted generation.",
        "CPU ms: of all threads, prefill included. Target calls count prefill. Same tokens: as "
        "jaxspec's plain "
        "decoding gives. -: the base of the comparison failed, or needs a draft that is not there.",
    ]
    if preset != "smollm2":
        lines.append(
            "The LLaVA draft of transformers 5 never sees the image (its `generate` drops the "
            "pixels of the assistant)."
        )
    if preset == "pair55m":
        lines.append(
            f"SYNTHETIC agreement: the draft is right after {acceptance:.0%} of the tokens."
        )
    return lines


def summaries(rows: Sequence[Record]) -> list[Record]:
    """Return a row a method, over all prompts. What failed on one of them has none."""
    prompts = {row["prompt"] for row in rows}
    found: dict[str, list[Timed]] = {}
    for row in rows:
        timed: dict[str, Any] = {field.name: row[field.name] for field in fields(Timed)}
        timed["tokens"] = tuple(row["tokens"])
        found.setdefault(row["method"], []).append(Timed(**timed))
    whole = {name: answers for name, answers in found.items() if len(answers) == len(prompts)}
    return [summary(name, answers, whole.get(PLAIN)) for name, answers in whole.items()]


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line a row. What lacks its base is `-`: a method that failed has no row."""
    lines = []
    for row in rows:
        line = [row["method"]]
        for rate in ("tokens_per_second", "decode_tokens_per_second"):
            bases = (
                [other[rate] for other in rows if other["method"].startswith(name)]
                for name in (EAGER, ASSISTED)
            )
            line += [
                f"{row[rate]:.1f}",
                *(f"{row[rate] / max(base):.2f}" if base else "-" for base in bases),
            ]
        same = row["token_identity_rate"]
        line += [f"{row['cpu_ms_per_token']:.2f}", f"{row['tokens_per_target_call']:.2f}"]
        lines.append([*line, "-" if same is None else f"{100 * same:.0f}%"])
    return lines


def write_pair(folder: Path, acceptance: float) -> tuple[Path, Path]:
    """Write the synthetic pair as two directories."""
    paths = folder / "target", folder / "draft"
    for path, name in zip(paths, ("synthetic:target", f"synthetic:draft:{acceptance}")):
        model = synthetic_model(name, jnp.dtype("float32"))
        saved = {"tokenizer": model.tokenizer, "image_processor": model.image_processor}
        options = huggingface.SaveOptions(overwrite=True)
        huggingface.save(path, model.config, model.params, options, **saved)
    return paths


def mini_prompts(target: LoadedModel, count: int) -> list[Prompt]:
    """Return questions whose answers are long: descriptions."""
    encoder = Engine(target).encoder
    return [first_prompt(encoder, sample) for sample in evaluation_set("describe", count)]


def random_prompts(target: LoadedModel, count: int) -> list[Prompt]:
    """Return an image of noise and 71 tokens of nothing: 648 tokens with the image's 576."""
    rng = np.random.default_rng(0)
    config: Any = target.config
    page = (3 * [config.vision_config.image_size])[:2]
    prompts = []
    for _ in range(count):
        text = rng.integers(300, config.text_config.vocab_size - 1, 71)
        tokens = np.asarray([1, config.image_token_index, *text], np.int32)
        prompts.append(Prompt(tokens, (rng.integers(0, 255, (*page, 3), dtype=np.uint8),)))
    return prompts


def ours(
    target: LoadedModel, drafts: Sequence[LoadedModel], gammas: Sequence[int], new: int
) -> dict[str, Method]:
    """Return jaxspec's methods: plain, with the target's KV head, and with the drafts."""

    def method(engine: Engine) -> Method:
        def run(prompt: Prompt) -> Timed:
            used, start = time.process_time(), time.perf_counter()
            (result,) = engine.generate([Request(prompt, new)])
            seconds, used = time.perf_counter() - start, time.process_time() - used
            return Timed(
                result.tokens, seconds, result.decode_ms / 1e3, used, result.stats.steps + 1
            )

        return run

    config = EngineConfig(new_buckets=(new,), prompt_buckets=(32, 64, 128, 648 + 32))
    methods = {PLAIN: method(Engine(target, None, replace(config, views=())))}
    ways: list[tuple[str, str, LoadedModel | None]] = (
        [] if target.head is None else [("KV head", "kv", None)]
    )
    ways += [
        ("view M", "M", draft) if draft.images else ("text draft", "T", draft) for draft in drafts
    ]
    for (name, view, draft), gamma in product(ways, gammas):
        how = replace(config, views=(view,), gamma=gamma)
        methods[f"jaxspec speculative, {name}, J = {gamma}"] = method(Engine(target, draft, how))
    return methods


def theirs(
    target: LoadedModel,
    path: Path,
    assistants: Mapping[str, Path],
    gammas: Sequence[int],
    new: int,
    compiled: bool,
    threads: int | None,
) -> dict[str, Method]:
    """Return transformers' own ways to decode faster, each with its base of comparison."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)

    def loaded(path: Path) -> Any:
        sees = "vision_config" in json.loads((path / "config.json").read_text())
        kind = (
            transformers.LlavaForConditionalGeneration
            if sees
            else transformers.AutoModelForCausalLM
        )
        return kind.from_pretrained(path, trust_remote_code=False).eval()

    model = loaded(path)
    drafts = {name: loaded(path) for name, path in assistants.items()}
    calls = [0]
    model.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    config: Any = target.config

    def method(
        assistant: Any = None, gamma: int = GAMMA, schedule: str = "constant", **options: Any
    ) -> Method:
        def run(prompt: Prompt) -> Timed:
            if assistant is not None:
                assistant.generation_config.num_assistant_tokens = gamma
                assistant.generation_config.num_assistant_tokens_schedule = schedule
                assistant.generation_config.assistant_confidence_threshold = (
                    0.0 if schedule == "constant" else 0.4
                )
                options["assistant_model"] = assistant
            given = expanded(prompt)
            length = given["input_ids"].shape[1]
            given |= options | {
                "do_sample": False,
                "pad_token_id": 3,
                "eos_token_id": text_config(config).eos_token_id,
            }
            with torch.inference_mode():
                start = time.perf_counter()
                model.generate(
                    **given, max_new_tokens=1
                ) if assistant is None and not options else None
                first, used = time.perf_counter(), time.process_time()
                calls[0] = 0
                tokens = model.generate(**given, max_new_tokens=new)[0, length:]
                end, used = time.perf_counter(), time.process_time() - used
            if first - start > 1e-3:
                prefill[prompt.tokens.tobytes()] = first - start
            spent = end - first
            return Timed(
                tuple(tokens.tolist()),
                spent,
                spent - prefill[prompt.tokens.tobytes()],
                used,
                calls[0],
            )

        return run

    prefill: dict[bytes, float] = {}

    def expanded(prompt: Prompt) -> dict[str, Any]:
        tokens, pixels = prompt.tokens, {}
        if prompt.images:
            assert target.image_processor is not None
            tokens = np.repeat(
                tokens, np.where(tokens == config.image_token_index, config.image_tokens, 1)
            )
            pages = [
                target.image_processor(images=image, return_tensors="pt") for image in prompt.images
            ]
            pixels = {"pixel_values": torch.cat([page["pixel_values"] for page in pages])}
        ids = torch.tensor(tokens.astype(np.int64))[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}

    methods = {EAGER: method()}
    if "LLaVA" in drafts:
        methods[f"{ASSISTED}, LLaVA draft, constant"] = method(drafts["LLaVA"])
        methods[f"{ASSISTED}, LLaVA draft, heuristic"] = method(
            drafts["LLaVA"], schedule="heuristic"
        )
    for gamma in gammas if "text" in drafts else ():
        methods[f"{ASSISTED}, text draft, J = {gamma}"] = method(drafts["text"], gamma)
    methods["transformers prompt lookup"] = method(prompt_lookup_num_tokens=GAMMA)
    if compiled:
        whole = transformers.CompileConfig(fullgraph=False)
        whole._compile_all_devices = True  # CPUs are left out otherwise
        methods["transformers static cache, compiled"] = method(
            cache_implementation="static", compile_config=whole
        )
    return methods


def measure(methods: Mapping[str, Method], prompt: Prompt, repeats: int) -> dict[str, Timed]:
    """Measure each method's best times by turns; one that fails is left out."""
    runs: dict[str, list[Timed]] = {name: [] for name in methods}
    for again, name in product(range(repeats + 1), methods):
        if name not in runs:
            continue
        try:
            found = methods[name](prompt)
        except Exception as error:  # whatever it is, the other methods go on
            tqdm.write(f"{name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
            del runs[name]
            continue
        if again:
            runs[name].append(found)
    return {name: best(found) for name, found in runs.items()}


def best(runs: list[Timed]) -> Timed:
    """Return the run with the least of each time."""
    least = {
        name: min(getattr(run, name) for run in runs)
        for name in ("seconds", "decode_seconds", "cpu_seconds")
    }
    return replace(runs[0], **least)


def summary(name: str, runs: list[Timed], reference: list[Timed] | None) -> dict[str, Any]:
    """Return rates over all prompts; identity is None without a reference."""
    count = sum(len(run.tokens) for run in runs)
    same = None if reference is None else [a.tokens == b.tokens for a, b in zip(runs, reference)]
    return {
        "method": name,
        "tokens": count,
        "tokens_per_second": count / sum(run.seconds for run in runs),
        "decode_tokens_per_second": (count - len(runs)) / sum(run.decode_seconds for run in runs),
        "cpu_ms_per_token": 1e3 * sum(run.cpu_seconds for run in runs) / count,
        "tokens_per_target_call": count / sum(run.target_calls for run in runs),
        "token_identity_rate": None if same is None else float(np.mean(same)),
    }


if __name__ == "__main__":
    run_script(main, __doc__)
