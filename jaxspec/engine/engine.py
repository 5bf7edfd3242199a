"""Decode requests with an engine, the public interface to decoding.

Everything inside a bucket (prompt length, images, new tokens, batch) is one compiled program.
Lengths, temperatures, limits, weights and keys are traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.cluster import map_over_processes
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_logprobs
from jaxspec.engine.assembly import collaboration, speculation, with_proposer
from jaxspec.engine.batches.batch import STRIDE, Batch
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.warmup import warmup_steps
from jaxspec.engine.compile_cache import timed
from jaxspec.engine.config import BATCH_BUCKETS, CollaborationConfig, EngineConfig
from jaxspec.engine.memory import MemoryReport
from jaxspec.engine.requests import Request, Result, decoded_images, nth_seed
from jaxspec.errors import InputError, check_counts, reading, warn_once
from jaxspec.loading.models import LoadedDraft, LoadedModel, load_draft
from jaxspec.loading.pairs import check_drafts
from jaxspec.models.int8 import Weights
from jaxspec.prompts.captions import Captioner
from jaxspec.prompts.rows import bucket
from jaxspec.prompts.views import needs_captioner
from jaxspec.runtime import say

__all__ = ["CollaborationConfig", "Engine", "EngineConfig", "LoadedModel", "Request", "Result"]

Config = TypeVar("Config", EngineConfig, CollaborationConfig)


@dataclass
class Engine:
    """Decode requests with a target and, if given, a draft.

    A list of models decodes collaboratively. The output follows the target's own distribution, or
    the models' combined distribution. The engine runs on the device or mesh of the (first) target,
    with the whole draft on each device.

    Raises InputError if the models do not share a tokeniser, or if a view needs an input that its
    model lacks.

    Attributes:
      target: Target model, or the list of models that decode collaboratively.
      draft: Draft model or head, or a list of one of each, which draft together.
      config: `EngineConfig`, or `CollaborationConfig` for a list of models; None: all defaults.
      captioner: Captioner for view C, called before prefill, with at most 16 images at a time.
      encoder: `PromptEncoder` with the target's chat template, which turns questions into prompts.
    """

    target: LoadedModel | Sequence[LoadedModel]
    draft: LoadedDraft | Sequence[LoadedDraft] | None = None
    config: EngineConfig | CollaborationConfig | None = None
    captioner: Captioner | None = None

    def __post_init__(self) -> None:
        """Check the types of the arguments, and assemble the program that they ask for."""
        models = [self.target] if isinstance(self.target, LoadedModel) else self.target
        if not isinstance(models, Sequence) or not all(isinstance(m, LoadedModel) for m in models):
            raise InputError(f"target: {self.target!r:.60}; give what LoadedModel.load returns")
        drafts = self.draft if isinstance(self.draft, Sequence) else [self.draft]
        drafts = [draft for draft in drafts if draft is not None]
        for draft in drafts:
            if not isinstance(draft, LoadedDraft):
                kind = type(draft).__name__
                raise InputError(f"draft: {kind}; give what load_draft returns")
        captioner = None
        if isinstance(self.target, LoadedModel):
            config = _checked(self.config, EngineConfig, "an EngineConfig for one target")
            assembly = speculation(self.target, drafts, config)
            if needs_captioner(assembly.mixture.views, self.captioner):
                captioner = self.captioner
        else:
            kind = "a CollaborationConfig for a list"
            config = with_proposer(self.target, _checked(self.config, CollaborationConfig, kind))
            if drafts:
                raise InputError("draft: collaborating models need none; leave it out")
            assembly = collaboration(self.target, config)
        for model in models:
            if model.settings is not None and config.generation_config == "auto":
                warn_once(model.settings.unapplied_line)
        self.config, self.assembly = config, assembly
        self.batcher = Batcher(assembly, config, captioner)
        self.encoder = self.batcher.encoder

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | Sequence[str | Path] | None = None,
        dtype: Any = None,
        mesh: Mesh | None = None,
        target_weights: Weights | None = None,
        draft_weights: Weights | None = None,
        **options: Any,
    ) -> Engine:
        """Load the named models and return their engine.

        Args:
          target: Directory or hub id of the target.
          draft: Directory or hub id of a draft model or head, or a list of one of each.
          dtype: Dtype of the computation, see `LoadedModel.load`.
          mesh: Mesh to split the target over.
          target_weights: Format of the target's weights, `weights` of `LoadedModel.load`.
          draft_weights: The same for drafts.
          options: Fields of `EngineConfig`, such as `gamma=5`.
        """
        config = EngineConfig(**options)
        names: Any = () if draft is None else draft
        if isinstance(names, str | Path) or not isinstance(names, Iterable):
            names = [names]
        names = list(names)
        check_drafts(target, names)
        loaded = LoadedModel.load(target, dtype, mesh=mesh, weights=target_weights)
        drafts = [load_draft(name, loaded, dtype, weights=draft_weights) for name in names]
        return cls(loaded, drafts, config)

    @overload
    def generate(self, requests: Request | str) -> Result: ...
    @overload
    def generate(self, requests: Sequence[Request | str]) -> list[Result]: ...
    def generate(self, requests: Request | str | Sequence[Request | str]) -> Any:
        """Decode one request or question, or a list of them; results keep the list's order."""
        listed, spread = _listed(requests), self.batcher.config.data_parallel_processes
        results = map_over_processes(self._generate, listed) if spread else self._generate(listed)
        return results[0] if isinstance(requests, Request | str) else results

    def _generate(self, requests: Sequence[Request | str]) -> list[Result]:
        """Decode a list of requests batch by batch; results keep the list's order."""
        refused: dict[int, str] | None = {} if self.batcher.config.keep_going else None
        encoded = self.batcher.read(requests, refused)
        results = {
            i: Result("", (), None, 0.0, 0.0, 0, error=error)
            for i, error in (refused or {}).items()
        }
        indices = [i for i in range(len(requests)) if i not in results]
        for members in self.batcher.batches(encoded):
            part = [encoded[i] for i in members]
            *_, done = Batch(self.batcher, part).answers(part)
            results.update(zip([indices[i] for i in members], done, strict=True))
        return [results[i] for i in range(len(requests))]

    def stream(self, request: Request | str) -> Iterator[Result]:
        """Yield the answer so far every few tokens; the last result is the whole answer.

        Each text and reasoning extends the one before: an incomplete character, or a text that may
        become a stop string, is held back. Closing the iterator stops decoding.
        """
        (encoded,) = self.batcher.read([request])
        for (result,) in Batch(self.batcher, [encoded]).answers([encoded], STRIDE):
            yield result

    def live(self, examples: Sequence[Request | str], prefixes: int = 0) -> Batch:
        """Return an empty batch which requests may join and leave while others decode.

        It has `batch_size` rows with room for the longest of the examples in each, whose images
        need no captions. In float32 an answer equals that of `generate` to only this request.

        prefixes: Maximum bytes that it keeps of prompts, for others that begin alike.
        """
        rows = self.batcher.config.batch_size
        encoded = self.batcher.read_examples(_listed(examples))
        return Batch(self.batcher, encoded, rows, live=True, prefixes=prefixes)

    def samples(self, request: Request | str, count: int) -> list[Result]:
        """Draw several answers to one prompt, which is prefilled once.

        In float32 sample i equals the answer to the request with seed + i, if `gamma` is fixed or
        nothing drafts. In 16 bits sums round by the size of the batch, so near-ties may fall
        differently in a batch of another size.
        """
        check_counts(count=count)
        (encoded,) = self.batcher.read([request])
        if encoded.temperature == 0:
            raise InputError("temperature: 0 makes all samples equal; give more than 0")
        seeds = [replace(encoded, seed=nth_seed(encoded.seed, i)) for i in range(count)]
        rows = bucket(min(count, BATCH_BUCKETS[-1]), BATCH_BUCKETS, "batch")
        *_, results = Batch(self.batcher, seeds, rows, one_prompt=True).answers(seeds)
        return results

    def logprobs(self, request: Request | str, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities [T] of an answer's tokens at temperature 1, unfiltered.

        They come from the target, or from the combination of collaborating models.
        """
        vocabulary = self.assembly.lead.model.text.vocab_size
        with reading(f"tokens: {tokens!r:.60}", "give the token ids of an answer"):
            answer = np.asarray([tokens])
        if answer.dtype.kind not in "iu" or answer.ndim != 2 or not answer.size:
            raise InputError(f"tokens: {tokens!r:.60}; give the token ids of an answer")
        if not 0 <= answer.min() <= answer.max() < vocabulary:
            raise InputError(f"tokens: {tokens!r:.60}; give ids from 0 to {vocabulary - 1}")
        request = request if isinstance(request, Request) else Request(request)
        (encoded,) = self.batcher.read([replace(request, max_new_tokens=1)])
        prompts, starts = self.batcher.scored(encoded, tokens)
        held, count = self.batcher.held([encoded]), answer.shape[1]
        padding = 2 ** (count - 1).bit_length() - count  # one program for each power of two
        answer = np.pad(answer.astype(np.int32), ((0, 0), (0, padding)))
        return np.asarray(timed(run_logprobs, held, prompts, answer, starts)[0])[:count]

    def check(self, request: Request | str) -> None:
        """Raise InputError if the request is too long or an image cannot be read."""
        decoded_images(self.batcher.read([request]))

    def prefill(self, requests: Sequence[Request | str]) -> DecodeState:
        """Prefill at most `batch_size` requests as one batch and return the state."""
        encoded = self.batcher.read(_listed(requests))
        together, rows = self.batcher.together(encoded), self.batcher.rows(len(encoded))
        options = together.options(encoded, rows)
        return self.batcher.prefill(together, encoded, options, together.sizes.new)[0]

    def warmup(self, requests: Request | str | Sequence[Request | str]) -> None:
        """Compile all programs that these requests need, with a progress bar on terminals."""
        batcher, encoded = self.batcher, self.batcher.read(_listed(requests))
        batches = [
            Batch(batcher, [encoded[i] for i in members]) for members in batcher.batches(encoded)
        ]
        distinct = {(batch.together, batch.rows, batch.waits): batch for batch in batches}
        count = sum(len(warmup_steps(batch)) for batch in distinct.values())
        with tqdm(total=count, unit="program", desc="compiling", delay=1, disable=None) as bar:
            while distinct:
                _, batch = distinct.popitem()  # frees its state
                for step in warmup_steps(batch):
                    step.run()
                    bar.update()
        if batcher.policy is not None:
            say(batcher.policy.report())

    def memory_report(self, requests: Request | str | Sequence[Request | str]) -> MemoryReport:
        """Return the bytes that the largest batch of these requests will take on a device."""
        return Batch(self.batcher, self.batcher.read(_listed(requests))).memory()


def _listed(requests: Any) -> Sequence[Request | str]:
    """Return one request, or any iterable of them, as a list."""
    if isinstance(requests, Request | str):
        return [requests]
    if isinstance(requests, dict | bytes) or not isinstance(requests, Iterable):
        kind = type(requests).__name__
        raise InputError(f"requests: a {kind}; give a Request, a question as a string, or a list")
    return list(requests)


def _checked(config: object, kind: type[Config], what: str) -> Config:
    """Return the config, by default the kind's own; raise InputError for another kind."""
    if config is not None and not isinstance(config, kind):
        raise InputError(f"config: {type(config).__name__}; give {what}")
    return config or kind()
