"""Captioners that run a model: any LVLM of this library, in JAX; or BLIP, BLIP-2 and Florence-2 by transformers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from PIL.Image import Image

from jaxspec.checkpoints import directories
from jaxspec.decoding.captions import CachedCaptions, Caption, Captioner, CaptionFile
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError, reading
from jaxspec.runtime import cache_directory

QUESTION = "Write a caption for this image."
TASKS = ("CAPTION", "DETAILED_CAPTION", "MORE_DETAILED_CAPTION")
"""Florence-2's, in angle brackets where it reads them."""
FORMS = "jax:DIR[:QUESTION], florence2:ID[:DETAILED_CAPTION], blip:ID or file:CAPTIONS.jsonl"
MODEL_TYPES = {"florence2": ("florence2",), "blip": ("blip", "blip-2")}
BATCH = 16
"""Most images captioned together."""


def check_captioner(text: str) -> tuple[str, str, str]:
    """(kind, name, how to ask it) of what `load_captioner` takes. Raises InputError for anything else."""
    kind, _, rest = text.partition(":")
    where, _, how = rest.partition(":")
    if not where or kind not in ("jax", "file", *MODEL_TYPES):
        raise InputError(f"captioner: {text!r} is unknown; give {FORMS}")
    return kind, where, how


def runs_torch(text: str) -> bool:
    """Whether the captioner of this name, if it is one, is run by torch."""
    return text.partition(":")[0] in MODEL_TYPES


def load_captioner(
    text: str, dtype: jnp.dtype | None = None, beside: LoadedModel | None = None, directory: Path | None = None
) -> Captioner:
    """The captioner that `text` names, its captions kept in `directory` (by default in jaxspec's cache).

    Args:
      text: one of `FORMS`. `blip:` reads BLIP and BLIP-2.
      dtype, beside: of a `jax:` captioner, see `LoadedModel.load`.
    """
    kind, where, how = check_captioner(text)
    if kind == "file":
        return CaptionFile(Path(text.removeprefix("file:")))
    if kind == "jax":
        path = directories.locate(where)
        model = LvlmCaptioner(LoadedModel.load(path, dtype, beside=beside), _fingerprint(path), how or QUESTION)
    else:
        model = TransformersCaptioner(kind, where, _task(how) if kind == "florence2" else None)
    return CachedCaptions(model, directory or cache_directory() / "captions")


@dataclass
class LvlmCaptioner:
    """An LVLM asked the same question about every image, greedily and in batches."""

    model: LoadedModel
    name: str
    """Which weights these are."""
    question: str = QUESTION
    max_new_tokens: int = 64
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.model, None, EngineConfig(batch_size=BATCH))

    @property
    def identity(self) -> str:
        dtype = jax.tree.leaves(self.model.params)[0].dtype
        return f"jax {self.name} {dtype} {self.max_new_tokens} {self.question}"

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """One answer an image, line breaks as spaces."""
        prompts = [self.engine.encoder.prompt(self.question, [image]) for image in images]
        results = self.engine.generate([Request(prompt, self.max_new_tokens) for prompt in prompts])
        return [Caption(" ".join(r.text.split()), (r.prefill_ms + r.decode_ms) / r.batch) for r in results]


@dataclass(frozen=True)
class TransformersCaptioner:
    """BLIP, BLIP-2 or Florence-2, run by transformers and torch with TABED's settings: 3 beams, no sampling.

    Captions are decoded without special tokens and not processed further, as in TABED's release.
    """

    kind: str
    """A key of `MODEL_TYPES`."""
    source: str
    """Directory or hub id."""
    task: str | None = None
    """Florence-2's task token."""
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if find_spec("torch") is None:
            raise InputError(f"captioner {self.kind}: runs in torch, which is not installed; install it or use jax:DIR")

    @property
    def identity(self) -> str:
        path = Path(self.source)
        name = _fingerprint(path) if path.is_dir() else f"{self.source} {self._loaded[1].config._commit_hash}"
        return f"{self.kind} {name} {self.task} {self.max_new_tokens}"

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """Processor and model."""
        import transformers

        directories.check_files(Path(self.source))
        with reading(f"captioner {self.kind}: transformers cannot read {self.source}"):
            config = transformers.AutoConfig.from_pretrained(self.source, trust_remote_code=False)
            if config.model_type not in MODEL_TYPES[self.kind]:
                raise InputError(
                    f"captioner {self.kind}: {self.source} is a {config.model_type!r}, not a "
                    f"{' or '.join(MODEL_TYPES[self.kind])}; choose from {FORMS}"
                )
            processor = transformers.AutoProcessor.from_pretrained(
                self.source, trust_remote_code=False, backend="pil"
            )
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                self.source, trust_remote_code=False, dtype="float32"
            )
        return processor, model.eval()

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Captions of all images, `BATCH` at a time."""
        parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        return [caption for part in parts for caption in self._batch(list(part))]

    def _batch(self, images: list[Image]) -> list[Caption]:
        processor, model = self._loaded
        start = time.perf_counter()
        text = None if self.task is None else [self.task] * len(images)
        inputs = processor(images=images, text=text, return_tensors="pt")
        ids = model.generate(**inputs, num_beams=3, do_sample=False, max_new_tokens=self.max_new_tokens)
        texts = processor.batch_decode(ids, skip_special_tokens=True)
        ms = 1e3 * (time.perf_counter() - start) / len(images)
        return [Caption(text.strip(), ms) for text in texts]


def _task(how: str) -> str:
    name = how or TASKS[0]
    name = name if name.endswith(TASKS[0]) else f"{name}_{TASKS[0]}"
    if name not in TASKS:
        raise InputError(f"captioner florence2: task {how!r} is unknown; use {', '.join(TASKS)}")
    return f"<{name}>"


def _fingerprint(path: Path) -> str:
    """Tells a directory's files apart from any others without reading gigabytes: names, sizes, times of change."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()
