"""Caption images for view C: with an LVLM in JAX, with BLIP or Florence-2 in torch, or from a file.

A caption belongs to an image, not to a prompt, so no caption is made twice: it is kept on disk
under a hash of the image's pixels and the captioner's identity.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from jaxspec.checkpoints.locating import hub_id, locate
from jaxspec.data.images import image_hash, load_image
from jaxspec.data.rows import DataRow, local_rows
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError, install_command, reading
from jaxspec.files import local_path, write_text
from jaxspec.prompts.captions import Caption, Captioner
from jaxspec.runtime import cache_directory

QUESTION = "Write a caption for this image."
TASKS = ("CAPTION", "DETAILED_CAPTION", "MORE_DETAILED_CAPTION")
"""Florence-2's tasks; the model reads them in angle brackets."""
FORMS = "jax:DIR[:QUESTION], florence2:ID[:DETAILED_CAPTION], blip:ID or file:CAPTIONS.jsonl"
MODEL_TYPES = {"florence2": ("florence2",), "blip": ("blip", "blip-2")}
BATCH = 16
"""Maximum images captioned together."""


def parse_captioner(text: str) -> tuple[str, str, str]:
    """Return kind, name and question of a captioner, or raise InputError for another form."""
    kind, _, source = text.partition(":")
    name, _, question = source.partition(":")
    if not name or kind not in ("jax", "file", *MODEL_TYPES):
        raise InputError(f"captioner: {text!r} is unknown; give {FORMS}")
    if kind == "florence2":
        _task(question)
    return kind, name, question


def runs_torch(text: str) -> bool:
    """Return whether torch runs the captioner of this name."""
    return text.partition(":")[0] in MODEL_TYPES


def check_captioner(text: str) -> None:
    """Raise InputError if `text` names no captioner, or one that cannot run here; load none."""
    kind, source, question = parse_captioner(text)
    if kind == "jax":
        directories.read_config(locate(source))
    elif kind == "file":
        if not os.path.isfile(local_path(text.removeprefix("file:"))):
            raise InputError(f"captioner {text}: no such file; check the path")
    else:
        _in_torch(kind, source, question).check()


def load_captioner(
    text: str,
    dtype: jnp.dtype | None = None,
    share_tower_with: LoadedModel | None = None,
    directory: Path | None = None,
) -> Captioner:
    """Load the captioner that `text` names.

    Args:
      text: One of `FORMS`; `blip:` reads BLIP and BLIP-2.
      dtype, share_tower_with: Options of a `jax:` captioner, see `LoadedModel.load`.
      directory: Directory that keeps captions; by default in jaxspec's cache.
    """
    kind, source, question = parse_captioner(text)
    if kind == "file":
        return CaptionFile(local_path(text.removeprefix("file:")))
    if kind == "jax":
        path = locate(source)
        lvlm = LoadedModel.load(path, dtype, share_tower_with=share_tower_with)
        model = LvlmCaptioner(lvlm, _fingerprint(path), question or QUESTION)
    else:
        model = _in_torch(kind, source, question)
    return CachedCaptions(model, directory or cache_directory() / "captions")


@dataclass(frozen=True)
class CachedCaptions:
    """Keep a captioner's captions on disk, in one small JSON file for each image.

    The file keeps the time of captioning, so a caption from disk reports the same `ms`.
    """

    captioner: Any
    """Captioner whose `identity` names its weights, prompt and decoding options."""
    directory: Path

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return captions from disk, and ask the captioner once for each missing one."""
        files = [self._file(image) for image in images]
        captions: dict[Path, Any] = {file: _read(file) for file in set(files)}
        missing = {file: image for file, image in zip(files, images) if captions[file] is None}
        missing_captions = self.captioner.caption(list(missing.values())) if missing else []
        for file, caption in zip(missing, missing_captions, strict=True):
            write_text(file, json.dumps({"caption": caption.text, "ms": caption.ms}) + "\n")
            captions[file] = caption
        return [captions[file] for file in files]

    def _file(self, image: Image) -> Path:
        key = hashlib.sha256(f"{self.captioner.identity}\n{image_hash(image)}".encode()).hexdigest()
        return self.directory / key[:2] / f"{key}.json"


def _read(file: Path) -> Caption | None:
    """Return the caption in a file, or None if there is no file; a damaged one is an InputError."""
    if not file.exists():
        return None
    with reading(f"captions {file}: cannot be read", "remove it"):
        record = json.loads(file.read_text(encoding="utf-8"))
        return Caption(str(record["caption"]), float(record["ms"]))


class CaptionFile:
    """Read captions from a JSONL file that any program may have written.

    `{"image": "pages/a.png", "caption": "..."}` names an image file, relative to the JSONL;
    `{"sha256": "...", "caption": "..."}` gives its `jaxspec.data.images.image_hash` instead.
    """

    def __init__(self, path: Path) -> None:
        """Read the whole file; the first wrong line raises InputError."""
        self.path = path
        self.captions: dict[str, str] = dict(map(self._entry, local_rows(path)))
        """Captions by image hash."""

    def _entry(self, row: DataRow) -> tuple[str, str]:
        text, key, name = (row.values.get(column) for column in ("caption", "sha256", "image"))
        if not isinstance(text, str) or not isinstance(key or name, str):
            raise InputError(f"captions {row.origin}: is wrong; give caption, and image or sha256")
        return key or image_hash(load_image((row.folder or Path()) / str(name))), text

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return the captions on file. Raises InputError for an image that has none."""
        keys = [image_hash(image) for image in images]
        for key, image in zip(keys, images, strict=True):
            if key not in self.captions:
                image_name = f"{image.width}x{image.height} image with sha256 {key}"
                raise InputError(f"captions {self.path.name}: none for the {image_name}; add it")
        return [Caption(self.captions[key]) for key in keys]


@dataclass
class LvlmCaptioner:
    """Ask an LVLM the same question about every image, greedily and in batches."""

    model: LoadedModel
    name: str
    """Name of the weights."""
    question: str = QUESTION
    max_new_tokens: int = 64
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        config = EngineConfig(batch_size=BATCH, generation_config="ignore")
        self.engine = Engine(self.model, None, config)

    @property
    def identity(self) -> str:
        dtype = jax.tree.leaves(self.model.params)[0].dtype
        return f"jax {self.name} {dtype} {self.max_new_tokens} {self.question}"

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return one answer for each image, with spaces for line breaks."""
        prompts = [self.engine.encoder.prompt(self.question, [image]) for image in images]
        results = self.engine.generate([Request(prompt, self.max_new_tokens) for prompt in prompts])
        return [
            Caption(" ".join(r.text.split()), (r.prefill_ms + r.decode_ms) / r.batch)
            for r in results
        ]


@dataclass(frozen=True)
class TransformersCaptioner:
    """Run BLIP, BLIP-2 or Florence-2 in transformers, in float32.

    As in TABED's release, which runs them in float16, Florence-2 has 3 beams, no sampling and up to
    1,024 tokens, and the others have their own defaults. Captions are decoded without special
    tokens and not processed further.
    """

    kind: str
    """A key of `MODEL_TYPES`."""
    source: str
    """Directory or hub id."""
    task: str | None = None
    """Florence-2's task token."""
    max_new_tokens: int = 1024
    """Maximum tokens of Florence-2's captions."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        if self.kind != "florence2":
            return {}
        return {"num_beams": 3, "do_sample": False, "max_new_tokens": self.max_new_tokens}

    def __post_init__(self) -> None:
        if find_spec("torch") is None:
            raise InputError(f"captioner {self.kind}: needs torch; {install_command('captioner')}")

    @cached_property
    def _path(self) -> Path:
        """Return the directory of config.json; for a model of the hub its name is a commit."""
        return locate(self.source, files=("config.json",))

    @property
    def _on_hub(self) -> tuple[str, str | None] | None:
        """Return its id and revision on the hub; None for a local directory."""
        return None if os.path.isdir(os.path.expanduser(self.source)) else hub_id(self.source)

    @property
    def identity(self) -> str:
        path = self._path
        name = f"{self.source} {path.name}" if self._on_hub else _fingerprint(path)
        return f"{self.kind} {name} {self.task} {self.settings}"

    def check(self) -> None:
        """Raise InputError if the configuration is missing or another model's; read no weights."""
        config = directories.read_raw_config(self._path)
        if (kind := config.get("model_type")) not in MODEL_TYPES[self.kind]:
            raise InputError(f"captioner {self.kind}: {self.source} is a {kind!r}; give {FORMS}")
        if self.kind == "florence2" and "auto_map" in config:
            raise InputError(
                f"captioner {self.kind}: {self.source} is in Florence-2's legacy form, which runs "
                f"code of its own; use florence2:florence-community/{Path(self.source).name}"
            )

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """Return the processor and the model."""
        import transformers

        self.check()
        source, revision = self._on_hub or (str(self._path), None)
        options = {} if revision is None else {"revision": revision}
        with reading(f"captioner {self.kind}: transformers cannot read {self.source}"):
            processor = transformers.AutoProcessor.from_pretrained(
                source, backend="pil", trust_remote_code=False, **options
            )
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                source, dtype="float32", trust_remote_code=False, **options
            )
        return processor, model.eval()

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return captions of all images, made `BATCH` at a time."""
        parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        return [caption for part in parts for caption in self._batch(list(part))]

    def _batch(self, images: list[Image]) -> list[Caption]:
        processor, model = self._loaded
        start = time.perf_counter()
        text = None if self.task is None else [self.task] * len(images)
        inputs = processor(images=images, text=text, return_tensors="pt")
        ids = model.generate(**inputs, **self.settings)
        texts = processor.batch_decode(ids, skip_special_tokens=True)
        ms = 1e3 * (time.perf_counter() - start) / len(images)
        return [Caption(text.strip(), ms) for text in texts]


def _in_torch(kind: str, source: str, task: str) -> TransformersCaptioner:
    """Return a captioner that runs in torch."""
    return TransformersCaptioner(kind, source, _task(task) if kind == "florence2" else None)


def _task(task: str) -> str:
    """Return Florence-2's prompt for a task, by default its first; InputError if it has none."""
    name = task or TASKS[0]
    name = name if name.endswith(TASKS[0]) else f"{name}_{TASKS[0]}"
    if name not in TASKS:
        raise InputError(f"captioner florence2: task {task!r} is unknown; use {', '.join(TASKS)}")
    return f"<{name}>"


def _fingerprint(path: Path) -> str:
    """Return a hash of a directory's file names, sizes and times, without reading the files."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    entries = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(entries).encode()).hexdigest()
