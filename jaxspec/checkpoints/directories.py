"""Check a stranger's checkpoint directory, read its config.json, and write a new directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock

from jaxspec.config import ModelConfig, QwenVLConfig, TextConfig
from jaxspec.config.quantisation import Quantisation
from jaxspec.errors import InputError, install_command, located, reading
from jaxspec.files import check_directory, whole_directory, writing
from jaxspec.models.families import family_of
from jaxspec.runtime import cache_directory, say

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
)
IMAGE_FILES = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
PARTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(config|generation_config)\.json"
    r"|adapter_(config\.json|model\.safetensors|model\.bin)|mask_embedding\.pt"
    r"|README\.md|chat_template\.(jinja|json)|additional_chat_templates|"
    + "|".join(map(re.escape, TOKENIZER_FILES + IMAGE_FILES))
)
"""Names of the files that a checkpoint consists of."""
_WEIGHTS = (".safetensors", ".bin")
READ = (".json", ".model", ".txt", ".jinja")
"""Suffixes of the files, except weights, that decide a model's inputs and outputs."""
_POINTER = b"version https://git-lfs"
"""Beginning of the file that a clone without git-lfs has in place of a large one."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_TORCH = (2, 11)
"""The first torch that lists tensors without reading them; loading was unsafe before 2.10."""
_LARGEST = 256 << 20
"""Maximum bytes of a file that holds no weights; the largest known tokenisers have 40 million."""


def check_files(path: Path) -> None:
    """Raise InputError for a file that is a pipe, a device, huge, outside, or a git-lfs pointer.

    Links may lead within the directory, and to the blobs of a hub cache. The error for any other
    link is the same whether or not its target exists.
    """
    _check_name(path)
    home = Path(os.path.realpath(path))
    homes = [home]
    if home.parent.name == "snapshots":  # of a hub cache, whose models may share their blobs
        homes += [folder / "blobs" for folder in home.parents[1:3]]  # not where a link leads
    for file in (*path.glob("*"), *path.glob("additional_chat_templates/*")):
        if file.suffix not in (*_WEIGHTS, *READ):
            continue
        there = Path(os.path.realpath(file))
        if not any(there.is_relative_to(home) for home in homes):
            raise InputError(f"{file}: a link out of the directory; put the file itself there")
        status = there.stat() if there.exists() else None
        if status and not stat.S_ISREG(status.st_mode):
            raise InputError(f"{file}: no regular file; remove it")
        if status and status.st_size < 1024:
            with reading(f"{file}: cannot be read", "mend its permissions"):
                is_pointer = there.read_bytes().startswith(_POINTER)
            if is_pointer:
                raise InputError(
                    f"{file}: a pointer of git-lfs, not the file; run `git lfs pull` there"
                )
        if status and file.suffix not in _WEIGHTS and status.st_size > _LARGEST:
            raise InputError(f"{file}: {status.st_size} bytes, but at most {_LARGEST} are read")


def _check_name(path: Path) -> None:
    """Raise InputError for a path that tokenizers and safetensors cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}: a path with bytes that are not UTF-8; rename it") from None


def weight_files(path: Path) -> list[Path]:
    """Return the weight files of a directory's model, in name order."""
    return sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def without_torch() -> str:
    """Return why .bin weights cannot be read here, and how to mend that; "" if they can be read.

    It does not import torch.
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) >= _TORCH:
        return ""
    least = ".".join(map(str, _TORCH))
    return (
        f"PyTorch's .bin is read with torch {least} or later, and here is {installed or 'none'}; "
        f"{install_command('torch')}, or save the model as safetensors "
        "(`jaxspec export` with torch)"
    )


def other_weights(path: Path) -> str:
    """Return what a directory holds in place of weights, and how to mend that; "" if unknown."""
    pattern = re.compile(r"adapter_config\.json|pytorch_model-.+|.+\.(gguf|bin|pth|msgpack)")
    names = sorted(file.name for file in path.iterdir() if pattern.fullmatch(file.name))
    if not names or (path / BIN).is_file() or (path / BIN_INDEX).is_file():
        return ""
    return (
        f"it holds only {names[0]}; give the whole model as safetensors (a LoRA adapter goes with "
        "its base model, as --adapter), a .bin with its index, or a .gguf file itself"
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    with reading(f"{file}: not readable as JSON", "fetch it again"):
        raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise InputError(f"{file}: holds a {type(raw).__name__}, not an object; fetch it again")
    return raw


_NUMBERS = re.compile(r"\[(\n[-+.,\d\seE]+)\]")
"""A list of numbers over several lines; strings of JSON contain no line ends."""


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object, indented; each list of numbers is one line (vocabularies have thousands)."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    text = _NUMBERS.sub(lambda match: "[" + " ".join(match[1].split()) + "]", text)
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes its escape.
    file.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def read_raw_config(path: Path) -> dict[str, Any]:
    """Return config.json as it is written."""
    check_files(path)
    file = path / "config.json"
    if not file.is_file():
        mend = (path.is_dir() and other_weights(path)) or "give a directory in Hugging Face layout"
        raise InputError(f"{file}: no such file; {mend}")
    return read_json(file)


def read_config(path: Path) -> ModelConfig:
    """Return the architecture that config.json describes; InputError for one that is not read."""
    return described(path)[0]


def described(path: Path) -> tuple[ModelConfig, Quantisation | None]:
    """Return what config.json says of a model, and of how it is quantised."""
    raw = read_raw_config(path)
    quantisation = quantisation_of(path, raw)
    return parse_config(path, raw), quantisation


def parse_config(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """Return the architecture of the config.json `raw`, read from the directory `path`."""
    file = path / "config.json"
    if "model_type" not in raw:
        raise InputError(f"{file}: no model_type; is this a model's directory?")
    if is_original_llava(raw):
        raise InputError(f"{file}: in the original LLaVA format; write it with `jaxspec import`")
    with located(file):
        kind = family_of(str(raw["model_type"])).config
    parts = ("text_config", "vision_config")
    if issubclass(kind, TextConfig):
        parts = _SIZES
    elif issubclass(kind, QwenVLConfig) and "text_config" not in raw:
        parts = (*_SIZES, "vision_config")
    if lacking := [name for name in parts if raw.get(name) in (None, {})]:
        # Defaults would describe another model, a 7B.
        raise InputError(f"{file}: no {', '.join(lacking)}; fetch the model's own config.json")
    with located(file), reading(f"{file}: not readable", "fetch it again"):
        return kind.from_hf(raw)


def is_original_llava(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is one of LLaVA's own format, not of transformers'.

    MSD's heads have copies of these entries, and one layer.
    """
    has_entries = "mm_vision_tower" in raw or "mm_projector_type" in raw
    return has_entries and raw.get("num_hidden_layers") != 1


def quantisation_of(path: Path, raw: dict[str, Any]) -> Quantisation | None:
    """Return how a directory's model is quantised; InputError for a format that is not read."""
    with located(path):
        return Quantisation.of(raw)


@contextmanager
def written_whole(path: str | Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new directory, which becomes the checkpoint at `path` if the block succeeds.

    Raises InputError as `check_destination`, and where it cannot be written.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    with whole_directory(path, lambda name: bool(PARTS.fullmatch(name))) as fresh:
        check_destination(path, overwrite)  # while no other process writes there
        yield fresh


def written_once(
    made_of: bytes, kind: str, name: str, write: Callable[[Path], object], source: Path | str
) -> Path:
    """Return the directory of a model in jaxspec's cache; the first call writes it.

    Args:
      made_of: Identity of the model's sources; another value gets another directory.
      kind: Folder of the cache.
      name: Name of the directory, which is the model's.
      write: Writes the model to a path.
      source: Origin of the model, for the line on standard error.
    """
    folder = cache_directory() / kind / hashlib.sha256(made_of).hexdigest()[:16]
    path = folder / name
    if (path / "config.json").is_file():
        return path
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # another process may write it: wait, use its result
            if not (path / "config.json").is_file():
                say(f"{source}: written to {path}, once")
                write(path)
    return path


def check_destination(path: str | Path, overwrite: bool, *sources: Path) -> None:
    """Raise InputError where a checkpoint would replace a source, or anything unasked."""
    path = Path(os.path.abspath(os.path.expanduser(path)))
    _check_name(path)
    check_directory(path)
    for source in (source.resolve() for source in sources):
        if path.resolve() in (source, *source.parents):
            raise InputError(f"{path}: holds the checkpoint that is read; give another path")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not _holds_checkpoint(path):
        raise InputError(f"{path}: exists and is no checkpoint; give another path, or remove it")
    if not overwrite:
        raise InputError(f"{path}: holds a checkpoint; give another path, or --overwrite")


def _holds_checkpoint(path: Path) -> bool:
    """Return whether a directory has a model's config.json and weights; others have one too."""
    try:
        raw = read_json(path / "config.json")
    except InputError:
        return False
    kinds = raw.keys() & {"model_type", "architectures", "speculators_model_type"}
    return bool(kinds) and any(file.suffix in _WEIGHTS for file in path.iterdir())
