"""Checkpoint directories: what strangers may have put there, its config.json, and writing one."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.config.schema import check_fields
from jaxspec.errors import InputError, first_line
from jaxspec.files import check_directory, whole_directory
from jaxspec.models import family_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("vocab.json", "merges.txt"),
)
IMAGE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_PARTS = (
    *(
        "config.json",
        "generation_config.json",
        SINGLE,
        INDEX,
        "README.md",
        *TOKENIZER_FILES,
        *IMAGE_FILES,
    ),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)
"""What a checkpoint consists of, besides the shards of its weights."""
_WEIGHTS = (".safetensors", ".bin")
_READ = (*_WEIGHTS, ".json", ".model", ".txt", ".jinja")
_TORCH = (2, 11)
"""The first torch that lists a file without reading its tensors; weights-only reading has holes before 2.10."""
_LARGEST = 256 << 20
"""Bytes of any such file but of weights; the largest tokenisers have 40 million."""
_DEEPEST = 32
"""Levels of objects and lists in a JSON file."""


def check_files(path: Path) -> None:
    """Refuse a directory in which a file that may be read is none, or lies elsewhere.

    Pipes block for ever who reads them. Links may lead within the directory, and to the blobs of a hub cache. What
    the error says of any other link does not depend on whether there is a file at its end.
    """
    home = Path(os.path.realpath(path))
    homes = [home]
    if (
        home.parent.name == "snapshots"
    ):  # of a model in a hub cache; its blobs may be links to those of all models
        homes += [Path(os.path.realpath(folder / "blobs")) for folder in home.parents[1:3]]
    for file in (*path.glob("*"), *path.glob("additional_chat_templates/*")):
        if file.suffix not in _READ:
            continue
        there = Path(os.path.realpath(file))
        if not any(there.is_relative_to(home) for home in homes):
            raise InputError(
                f"{file}: a link that leads out of the directory; put the file itself there"
            )
        found = there.stat() if there.exists() else None
        if found and not stat.S_ISREG(found.st_mode):
            raise InputError(f"{file}: no regular file; remove it")
        if found and file.suffix not in _WEIGHTS and found.st_size > _LARGEST:
            raise InputError(
                f"{file}: {found.st_size} bytes, and at most {_LARGEST} are read; fetch it again"
            )


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights that a directory's model may be read from, in name order."""
    return sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def without_torch() -> str:
    """Return why .bin weights cannot be read here, and the mend; "" where they can. Does not import torch."""
    found = installed("torch")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= _TORCH:
        return ""
    least = ".".join(map(str, _TORCH))
    return (
        f"PyTorch's .bin is read with torch {least} or later, and here is {found or 'none'}; "
        "pip install -e '.[torch]', or save the model as safetensors (`jaxspec export` where torch is)"
    )


def installed(package: str) -> str:
    """Return the version of a Python package, unimported; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def what_lies_in(path: Path) -> str:
    """Return what lies in the place of a model's weights, and what to do about it; "" if nothing known."""
    names = sorted(file.name for file in path.iterdir())
    if not names:
        return "the directory is empty; fetch the model again"
    if "adapter_config.json" in names:
        return "it is a LoRA adapter; merge it into its base model (PEFT: merge_and_unload) and save that"
    if not {BIN, BIN_INDEX}.isdisjoint(names):
        return ""
    if shards := [name for name in names if re.fullmatch(r"pytorch_model-\d+-of-\d+\.bin", name)]:
        return f"only shards ({shards[0]}) without their {BIN_INDEX}; fetch that too"
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"only GGUF weights ({files[0]}); give that file itself"
    for ending, kind in ((".bin", "PyTorch .bin"), (".pth", "PyTorch .pth"), (".msgpack", "Flax")):
        found = [name for name in names if name.endswith(ending)]
        if found:
            return (
                f"only {kind} weights ({found[0]}); save the model as safetensors with transformers"
            )
    return ""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: not readable as JSON ({first_line(error)}); fetch it again"
        ) from error
    if not isinstance(raw, dict):
        raise InputError(f"{file}: holds a {type(raw).__name__}, not an object; fetch it again")
    parts: list[Any] = [raw]
    for _ in range(_DEEPEST):
        lists = [
            part.values() if isinstance(part, dict) else part
            for part in parts
            if isinstance(part, dict | list)
        ]
        parts = [part for inner in lists for part in inner]
    if parts:
        raise InputError(f"{file}: nested over {_DEEPEST} deep; fetch it again")
    return raw


_NUMBERS = re.compile(r"\[(\n[-+.,\d\seE]+)\]")
"""A list of numbers over several lines; no string of JSON's has such an end of line in it."""


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object, indented, but lists of numbers (a draft vocabulary has thousands) each on one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    file.write_text(text + "\n", encoding="utf-8")


def read_raw_config(path: Path) -> dict[str, Any]:
    """Return config.json as it is written."""
    check_files(path)
    if not (path / "config.json").is_file():
        mend = (path.is_dir() and what_lies_in(path)) or "give a directory in Hugging Face layout"
        raise InputError(f"{path / 'config.json'}: no such file; {mend}")
    return read_json(path / "config.json")


def read_config(path: Path) -> ModelConfig:
    """Return the architecture that config.json describes; InputError for a quantised model's."""
    raw = read_raw_config(path)
    if problems := quantised(path, raw):
        raise InputError(problems[0])
    return parse_config(path, raw)


def parse_config(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """Return the architecture of what `read_raw_config` read at a path."""
    if "model_type" not in raw:
        raise InputError(f"{path / 'config.json'}: no model_type; is this a model's directory?")
    check_fields("config.json", {"model_type": raw["model_type"]})
    return family_of(raw["model_type"]).config.from_hf(raw)


def quantised(path: Path, raw: dict[str, Any]) -> list[str]:
    """Return at most one problem: the configuration of the model or of a part says that it is quantised."""
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    found = [
        part[key]
        for part in parts
        for key in ("quantization_config", "compression_config")
        if part.get(key)
    ]
    if not found:
        return []
    method = found[0].get("quant_method", "?") if isinstance(found[0], dict) else found[0]
    return [
        f"{path / 'config.json'}: the model is quantised ({method}); "
        "take the original in float32, float16 or bfloat16, or dequantise it with transformers"
    ]


@contextmanager
def written_whole(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new directory, which becomes the checkpoint at `path` if the block succeeds.

    Raises InputError as `check_destination`, and where it cannot be written.
    """
    path = Path(os.path.abspath(Path(path).expanduser()))
    with whole_directory(path, _is_part) as fresh:
        check_destination(path, overwrite)  # while no other process writes there
        yield fresh


def check_destination(path: str | Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise InputError where no checkpoint may be written: over another unasked, over its source, over other files."""
    path = Path(os.path.abspath(Path(path).expanduser()))
    check_directory(path)
    if source is not None and path.resolve() in (read := source.resolve(), *read.parents):
        raise InputError(f"{path}: holds the checkpoint that is read; give another path")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: exists and is no checkpoint; give another path, or remove it")
    if not overwrite:
        raise InputError(
            f"{path}: holds a checkpoint; give another path, or --overwrite (overwrite=True)"
        )


def check_output(out: Path, *runs: Path) -> None:
    """Raise InputError where training in the directories `runs` may not leave its model; asked before it begins."""
    check_destination(out, overwrite=True)
    if (out / "config.json").exists() and not any(run.exists() for run in runs):
        raise InputError(
            f"--out {out}: holds a model that another run made; give another path, or remove it"
        )


def _is_part(name: str) -> bool:
    return name in _PARTS or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None
