"""Time the methods of `eval.peers`, jaxspec's engines and transformers' `generate`, by turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from eval.lib.times.passes import there_and_back
from jaxspec.config import text_config
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.loading.models import LoadedDraft
from jaxspec.prompts.encoder import Prompt

GAMMA = 5
PLAIN, EAGER, ASSISTED = "jaxspec plain", "transformers eager", "transformers assisted"


@dataclass(frozen=True)
class Timed:
    """Hold one prompt's answer by one method."""

    tokens: tuple[int, ...]
    seconds: float
    """Seconds from prepared inputs to the last token."""
    decode_seconds: float
    """Seconds without prefill."""
    cpu_seconds: float
    """CPU seconds of all threads, prefill included."""
    target_calls: int
    """Forward passes of the target, prefill included."""


Method = Callable[[Prompt, int], Timed]
"""Function of a prompt and the most new tokens."""


def jaxspec_methods(
    target: LoadedModel,
    drafts: Sequence[LoadedDraft],
    gammas: Sequence[int],
    new: int,
    buckets: tuple[int, ...],
) -> dict[str, Method]:
    """Return jaxspec's methods: plain decoding, lookup, each of the drafts, a text draft with
    lookup.

    Args:
      new: Maximum new tokens of any request, which fixes the shapes.
      buckets: Prompt lengths that programs are compiled for.
    """

    def method(engine: Engine) -> Method:
        def run(prompt: Prompt, new: int) -> Timed:
            used, start = time.process_time(), time.perf_counter()
            (result,) = engine.generate([Request(prompt, new)])
            seconds, used = time.perf_counter() - start, time.process_time() - used
            return Timed(
                result.tokens, seconds, result.decode_ms / 1e3, used, result.stats.steps + 1
            )

        return run

    config = EngineConfig(new_buckets=(new,), prompt_buckets=buckets, generation_config="ignore")
    methods = {PLAIN: method(Engine(target, None, config))}
    ways: list[tuple[str, tuple[str, ...], LoadedDraft | None]] = [("lookup", ("lookup",), None)]
    for draft in drafts:
        if not isinstance(draft, LoadedModel):
            ways.append(("KV head", (), draft))
        else:
            ways.append(
                ("view M", ("M",), draft) if draft.images else ("text draft", ("T",), draft)
            )
            if text_config(target.config) is target.config:
                ways.append(("text draft + lookup", ("T", "lookup"), draft))
    for (name, views, draft), gamma in product(ways, gammas):
        engine = Engine(target, draft, replace(config, views=views, gamma=gamma))
        methods[f"jaxspec speculative, {name}, gamma = {gamma}"] = method(engine)
    return methods


def transformers_methods(
    target: LoadedModel,
    path: Path,
    assistants: Mapping[str, Path],
    gammas: Sequence[int],
    dtype: str,
    compiled: bool,
    threads: int | None,
) -> dict[str, Method]:
    """Return transformers' ways to decode: eager, assisted, prompt lookup, compiled."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    torch_dtype = getattr(torch, dtype)

    def loaded(path: Path) -> Any:
        sees = "vision_config" in json.loads((path / "config.json").read_text())
        kind = (
            transformers.LlavaForConditionalGeneration
            if sees
            else transformers.AutoModelForCausalLM
        )
        model = kind.from_pretrained(path, trust_remote_code=False, dtype=torch_dtype)
        return model.to(device).eval()

    model = loaded(path)
    drafts = {name: loaded(path) for name, path in assistants.items()}
    calls = [0]
    model.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    config: Any = target.config

    def method(
        assistant: Any = None, gamma: int = GAMMA, schedule: str = "constant", **options: Any
    ) -> Method:
        """Return a method that answers by transformers; the first one's runs also time prefill."""

        def run(prompt: Prompt, new: int) -> Timed:
            """Answer a prompt with at most `new` tokens; return times and passes too."""
            if assistant is not None:
                assistant.generation_config.update(
                    num_assistant_tokens=gamma,
                    num_assistant_tokens_schedule=schedule,
                    assistant_confidence_threshold=0.0 if schedule == "constant" else 0.4,
                )
                options["assistant_model"] = assistant
            inputs = expanded(prompt)
            length = inputs["input_ids"].shape[1]
            special = {"pad_token_id": 3, "eos_token_id": text_config(config).eos_token_id}
            inputs |= options | special | {"do_sample": False}
            key = prompt.tokens.tobytes()
            with torch.inference_mode():
                if assistant is None and not options:
                    start = time.perf_counter()
                    model.generate(**inputs, max_new_tokens=1)
                    prefill[key] = time.perf_counter() - start
                calls[0] = 0
                start, used = time.perf_counter(), time.process_time()
                tokens = model.generate(**inputs, max_new_tokens=new)[0, length:].tolist()
                spent, used = time.perf_counter() - start, time.process_time() - used
            return Timed(tuple(tokens), spent, spent - prefill[key], used, calls[0])

        return run

    prefill: dict[bytes, float] = {}

    def expanded(prompt: Prompt) -> dict[str, Any]:
        """Return transformers' inputs of a prompt, with a placeholder for each token of images."""
        tokens, pixels = prompt.tokens, {}
        if prompt.images:
            assert target.image_processor is not None
            slots = np.where(tokens == config.image_token_index, config.image_tokens, 1)
            tokens = np.repeat(tokens, slots)
            pages = [
                target.image_processor(images=image, return_tensors="pt") for image in prompt.images
            ]
            values = torch.cat([page["pixel_values"] for page in pages])
            pixels = {"pixel_values": values.to(device, torch_dtype)}
        ids = torch.tensor(tokens.astype(np.int64), device=device)[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}

    methods = {EAGER: method()}
    if "LLaVA" in drafts:
        methods[f"{ASSISTED}, LLaVA draft, constant"] = method(drafts["LLaVA"])
        methods[f"{ASSISTED}, LLaVA draft, heuristic"] = method(
            drafts["LLaVA"], schedule="heuristic"
        )
    for gamma in gammas if "text" in drafts else ():
        methods[f"{ASSISTED}, text draft, gamma = {gamma}"] = method(drafts["text"], gamma)
    methods["transformers prompt lookup"] = method(prompt_lookup_num_tokens=GAMMA)
    if compiled:
        whole = transformers.CompileConfig(fullgraph=False)
        whole._compile_all_devices = True  # CPUs are left out otherwise
        methods["transformers static cache, compiled"] = method(
            cache_implementation="static", compile_config=whole
        )
    return methods


def measure(
    methods: Mapping[str, Method], prompt: Prompt, new: int, repeats: int, warm: int
) -> dict[str, Timed]:
    """Return each method's least times, run by turns; a method that fails is left out.

    Args:
      warm: New tokens of the run before the timed ones.
    """
    runs: dict[str, list[Timed]] = {name: [] for name in methods}
    for turn in range(repeats + 1):
        for name in there_and_back(runs, turn):
            try:
                result = methods[name](prompt, new if turn else warm)
            except Exception as error:  # one method's failure does not stop the others
                line = f"{name}: {type(error).__name__}: {error}".splitlines()[0]
                tqdm.write(line, file=sys.stderr)
                del runs[name]
                continue
            if turn:
                runs[name].append(result)
    return {name: best(result) for name, result in runs.items()}


def best(runs: list[Timed]) -> Timed:
    """Return the run with the least of each time."""
    least = {
        name: min(getattr(run, name) for run in runs)
        for name in ("seconds", "decode_seconds", "cpu_seconds")
    }
    return replace(runs[0], **least)
