"""Models in Hugging Face layout, in and out: config.json and safetensors, one file or shards.

A tensor's name is computed from its parameter's path: `layers_0` reads `layers.0`; `kernel` and `embedding`
read `weight`; a dense kernel [in, out] is stored [out, in], a convolution's [..., in, out] is stored
[out, in, ...]. That is the layout of the hub's files, which transformers 4 and 5 both read. The other
layouts that transformers has written are brought to it by the regex rows of `jaxspec.models.FAMILIES`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from jaxspec.checkpoints.border import check_files, first_line
from jaxspec.checkpoints.fitting import Slot, in_hub_layout, misfits, oversized, slots_of, tensor_name
from jaxspec.checkpoints.processors import IMAGE_BESIDE, TOKENIZER_BESIDE, save_processors
from jaxspec.checkpoints.tensor_files import (
    INDEX,
    SINGLE,
    Box,
    StoredTensor,
    check_finite,
    list_directory,
    what_lies_in,
)
from jaxspec.config import ModelConfig, text_config
from jaxspec.config.schema import check_fields
from jaxspec.errors import InputError
from jaxspec.files import check_directory, whole_directory
from jaxspec.models import family_of
from jaxspec.runtime import PeakMemory, human_bytes
from jaxspec.typing import Params

_WANTED = ("*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja", "README.md")
_PARTS = (
    *("config.json", "generation_config.json", SINGLE, INDEX, "README.md"),
    *(*TOKENIZER_BESIDE, *IMAGE_BESIDE),
)
"""What a checkpoint consists of, besides the shards of its weights."""
_LARGE = 1 << 20
"""Bytes of a tensor from which on a second thread looks at its numbers: to hand it over takes as long as so many."""
_TOLD = 4
"""Problems that an error spells out; of the others it gives the count."""
_DEEPEST = 32
"""Levels of objects and lists in a JSON file."""
_NOT_KEPT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("quantization_config", "compression_config", "vocab_size", "use_cache"),
}
"""Entries of a source's config.json that are not true of what is written from it, or not about the model."""


@dataclass(frozen=True)
class LoadReport:
    """What reading a checkpoint took."""

    nbytes: int
    """Bytes of the parameters that this process holds now, every device's copy counted."""
    devices: int
    seconds: float
    host_peak: int
    """By how many bytes this process's memory grew at most. On CPU devices that includes the parameters."""

    def __str__(self) -> str:
        return (
            f"{human_bytes(self.nbytes)} on {self.devices} device{'s' * (self.devices > 1)} in {self.seconds:.1f} s, "
            f"host memory grew by {human_bytes(self.host_peak)} at most"
        )


@dataclass(frozen=True)
class Checkpoint:
    """A model read from `path`, a local directory (tokeniser and image processor lie there too)."""

    config: ModelConfig
    params: Params
    path: Path
    report: LoadReport


@dataclass(frozen=True)
class Survey:
    """What a directory holds, known without reading a tensor, and everything that keeps it from being loaded."""

    path: Path
    config: ModelConfig | None
    """None where config.json is missing, unreadable or of an unsupported family."""
    tensors: dict[str, StoredTensor]
    """By their names in the hub's layout."""
    problems: list[str]


def survey(path: Path) -> Survey:
    """Looks at a local directory without reading its tensors; never raises for what is wrong in it."""
    problems: list[str] = []
    config = None
    try:
        check_files(path)
    except InputError as error:
        return Survey(path, None, {}, [str(error)])
    try:
        raw = read_raw_config(path)
        problems += _quantised(path, raw)
        config = _parse(path, raw)
    except InputError as error:
        problems.append(str(error))
        if not (path / "config.json").is_file():
            return Survey(path, None, {}, problems)
    tensors = list_directory(path, problems)
    if config is None:
        return Survey(path, None, {tensor.name: tensor for tensor in tensors}, problems)
    whole = not problems
    stored = in_hub_layout(tensors, family_of(config.model_type).layouts, problems)
    if problems and not stored:
        return Survey(path, config, stored, problems)
    too_large = oversized(config, stored)
    problems += too_large
    if not too_large:
        misfit = misfits(config, slots_of(config)[0], stored)
        # With a shard unread, what is missing was told already.
        problems += misfit if whole else [problem for problem in misfit if not problem.endswith(" is missing")]
    return Survey(path, config, stored, problems)


def load(
    path_or_id: str | Path,
    *,
    dtype: jnp.dtype | None = None,
    revision: str | None = None,
    shardings: Any | None = None,
) -> Checkpoint:
    """Reads a local directory or a hub id such as `llava-hf/llava-1.5-7b-hf` (fetched into the hub's cache).

    Strict: every tensor is used once, every parameter is filled, shapes and floating dtypes fit config.json.
    Tensors are read and cast one after the other, so the host never holds a second copy of the model.

    Args:
      dtype: dtype of all parameters; None keeps each as stored.
      revision: branch, tag or commit of a hub id.
      shardings: pytree of `jax.sharding.Sharding`, shaped like the parameters (`jaxspec.sharding.shardings`).
        Each process reads only the bytes that its devices hold. None puts everything on the default device.

    Raises:
      InputError: no such directory or id, unreadable files, an unsupported architecture, or tensors that do
        not fit; one line that names the first few problems and counts the rest.
    """
    path = locate(path_or_id, revision)
    start = time.perf_counter()
    found = survey(path)
    if found.problems or found.config is None:
        raise InputError(_line(path, found.problems))
    config = found.config
    slots, tree = slots_of(config)
    targets = tree.flatten_up_to(shardings) if shardings is not None else [None] * len(slots)
    work = tqdm(zip(slots, targets), f"load {path.name}", len(slots), unit="tensor", delay=2)
    checks: list[Future[None]] = []
    with PeakMemory() as memory, ThreadPoolExecutor(1) as beside:

        def read(tensor: StoredTensor, box: Box | None = None) -> np.ndarray:
            held = tensor.read(box)
            if held.nbytes < _LARGE:
                check_finite(tensor, held)
            else:
                checks.append(beside.submit(check_finite, tensor, held))  # while the next one is read
            return held

        leaves = [_read(found.tensors[name], slots[name], dtype, target, read) for name, target in work]
        jax.block_until_ready(leaves)
    for check in checks:
        check.result()
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    devices = len({shard.device for shard in shards})
    nbytes = sum(shard.data.nbytes for shard in shards)
    report = LoadReport(nbytes, devices, time.perf_counter() - start, memory.growth)
    return Checkpoint(config, jax.tree.unflatten(tree, leaves), path, report)


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    tokenizer: Any | None = None,
    image_processor: Any | None = None,
    dtype: jnp.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    generation: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a directory that `load` and transformers (4.57 and 5) read, with nothing missing or unexpected.

    It is written beside `path` and renamed at the end.

    Args:
      tokenizer, image_processor: transformers' objects, written along.
      dtype: dtype of the file's tensors; None keeps each as it is.
      max_shard_bytes: larger models become shards with an index; one shard at a time is copied to the host.
      generation: entries of generation_config.json, before the config's BOS, EOS and padding ids; None leaves one out.
      extra: config.json of the model's source; entries that this library does not read are kept, nested ones too.
      beside: writes more files into the directory that it is given, before that is renamed to `path`.
      overwrite: replace a checkpoint that is there, in one step; what else lies in its directory stays.

    Raises:
      InputError: `path` holds something, or cannot be written, or the parameters do not fit the config.
    """
    path = Path(os.path.abspath(Path(path).expanduser()))
    slots, _ = slots_of(config)
    leaves = {tensor_name(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    wrong = sorted(
        {name for name, leaf in leaves.items() if name not in slots or slots[name].shape != leaf.shape}
        | (slots.keys() - leaves.keys())
    )
    if wrong:
        raise InputError(_line(path, [f"the parameters do not fit the config: {wrong[0]}", *wrong[1:]]))

    with written_whole(path, overwrite) as fresh:
        _write_configs(fresh, config, dtype or jnp.result_type(*leaves.values()), generation or {}, extra or {})
        _write_tensors(fresh, slots, leaves, dtype, max_shard_bytes)
        save_processors(fresh, config, tokenizer, image_processor)
        if beside is not None:
            beside(fresh)


@contextmanager
def written_whole(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A new directory beside `path`, which takes its place at the end: a checkpoint is there whole, or not at all.

    Raises InputError as `check_destination`, and where it cannot be written.
    """
    check_destination(path, overwrite)
    with whole_directory(path, _is_part) as fresh:
        yield fresh


def check_destination(path: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raises InputError where no checkpoint may be written: over another unasked, over its source, over other files."""
    check_directory(path)
    if source is not None and path.resolve() in (read := source.resolve(), *read.parents):
        raise InputError(f"{path}: holds the checkpoint that is read; give another path")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: exists and is no checkpoint; give another path, or remove it")
    if not overwrite:
        raise InputError(f"{path}: holds a checkpoint; give another path, or --overwrite (overwrite=True)")


def check_output(out: Path, *runs: Path) -> None:
    """Raises InputError where training in the directories `runs` may not leave its model; asked before it begins."""
    check_destination(Path(os.path.abspath(out)), overwrite=True)
    if (out / "config.json").exists() and not any(run.exists() for run in runs):
        raise InputError(f"--out {out}: holds a model that another run made; give another path, or remove it")


def _is_part(name: str) -> bool:
    """Whether a file of this name belongs to the checkpoint it lies in."""
    return name in _PARTS or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) is not None


def locate(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local directory of a checkpoint; a hub id is fetched (or found in the hub's cache) first."""
    path = Path(path_or_id).expanduser()
    named = str(path_or_id) != ""  # which would be the working directory
    if named and path.is_dir():
        return path
    if named and path.exists():
        raise InputError(f"checkpoint {str(path_or_id)!r}: is a file; give the directory that holds config.json")
    if isinstance(path_or_id, Path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path_or_id):
        raise InputError(
            f"checkpoint {str(path_or_id)!r}: no such directory; give one, or a hub id owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"checkpoint {path_or_id!r}: no such directory, and not to be had from the hub "
            f"({type(error).__name__}); check name, revision and network, or give a local directory"
        ) from error


def read_config(path: Path) -> ModelConfig:
    """The architecture that a checkpoint directory's config.json describes; InputError for a quantised model's."""
    raw = read_raw_config(path)
    problems = _quantised(path, raw)
    if problems:
        raise InputError(problems[0])
    return _parse(path, raw)


def read_raw_config(path: Path) -> dict[str, Any]:
    """config.json as it is written."""
    check_files(path)
    if not (path / "config.json").is_file():
        mend = what_lies_in(path) or "give a directory in Hugging Face layout"
        raise InputError(f"{path / 'config.json'}: no such file; {mend}")
    return read_json(path / "config.json")


def _parse(path: Path, raw: dict[str, Any]) -> ModelConfig:
    if "model_type" not in raw:
        raise InputError(f"{path / 'config.json'}: no model_type; is this a model's directory?")
    check_fields("config.json", {"model_type": raw["model_type"]})
    return family_of(raw["model_type"]).config.from_hf(raw)


def _quantised(path: Path, raw: dict[str, Any]) -> list[str]:
    """At most one problem: the configuration of the model or of a part says that it is quantised."""
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    found = [part[key] for part in parts for key in ("quantization_config", "compression_config") if part.get(key)]
    if not found:
        return []
    method = found[0].get("quant_method", "?") if isinstance(found[0], dict) else found[0]
    return [
        f"{path / 'config.json'}: the model is quantised ({method}); "
        "take the original in float32, float16 or bfloat16, or dequantise it with transformers"
    ]


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not readable as JSON ({first_line(error)}); fetch it again") from error
    if not isinstance(raw, dict):
        raise InputError(f"{file}: holds a {type(raw).__name__}, not an object; fetch it again")
    parts: list[Any] = [raw]
    for _ in range(_DEEPEST):
        lists = [part.values() if isinstance(part, dict) else part for part in parts if isinstance(part, dict | list)]
        parts = [part for inner in lists for part in inner]
    if parts:
        raise InputError(f"{file}: nested over {_DEEPEST} deep; fetch it again")
    return raw


def _line(path: Path, problems: list[str]) -> str:
    """The problems as one line; each names its file, or is about what config.json and the tensors say."""
    told, more = problems[:_TOLD], len(problems) - _TOLD
    line = "; ".join(told) + (f"; and {more} more ({len(problems)} in all)" if more > 0 else "")
    return line if line.startswith(str(path)) else f"{path}: {line}"


def _read(
    tensor: StoredTensor,
    slot: Slot,
    dtype: jnp.dtype | None,
    sharding: Any | None,
    read: Callable[..., np.ndarray],
) -> jax.Array:
    """Reads (with `read`) what this process's devices hold of a tensor, once, and gives each device its part."""
    back = np.argsort(slot.order)
    if sharding is None:
        whole = read(tensor)
        return jax.device_put(whole.astype(dtype or whole.dtype, copy=False).transpose(back))
    pieces = sharding.addressable_devices_indices_map(slot.shape).values()
    spans = [[part.indices(size)[:2] for part, size in zip(piece, slot.shape)] for piece in pieces]
    box = [slice(min(s[axis][0] for s in spans), max(s[axis][1] for s in spans)) for axis in range(len(slot.shape))]
    held = read(tensor, [box[axis] for axis in slot.order]).transpose(back)

    def part(index: Any) -> np.ndarray:
        inner = [part.indices(size)[:2] for part, size in zip(index, slot.shape)]
        own = held[tuple(slice(a - b.start, z - b.start) for (a, z), b in zip(inner, box))]
        # Copied, so that no device keeps the whole box alive; as integers, which numpy moves faster than bfloat16.
        if dtype in (None, own.dtype):
            return np.array(own.view(f"u{own.itemsize}"), order="C").view(own.dtype)
        return np.array(own, dtype, order="C")

    return jax.make_array_from_callback(slot.shape, sharding, part)


def _write_tensors(
    path: Path, slots: dict[str, Slot], leaves: dict[str, Any], dtype: jnp.dtype | None, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    sizes = {name: leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for name, leaf in leaves.items()}
    for name in slots:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)

    where = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            leaf = np.asarray(leaves[name]).transpose(slots[name].order)
            # "C": safetensors writes the buffer as it lies, whatever its strides.
            tensors[name] = leaf.astype(dtype or leaf.dtype, order="C")
            where[name] = file
        save_file(tensors, path / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read, whatever the umask says.
        (path / file).chmod((path / "config.json").stat().st_mode)
    if len(shards) > 1:
        _write_json(path / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def _write_configs(
    path: Path, config: ModelConfig, dtype: Any, generation: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    name, by = jnp.dtype(dtype).name, {"transformers_version": version("transformers")}
    # `torch_dtype` is what transformers before 4.56 reads.
    own = _with_extra(config.to_hf(), extra) | {"dtype": name, "torch_dtype": name} | by
    _write_json(path / "config.json", own)
    ids = {key: getattr(text_config(config), key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {key: value for key, value in (ids | dict(generation)).items() if value is not None}
    _write_json(path / "generation_config.json", known | by)


def _with_extra(own: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json, and those of its source that it says nothing of."""
    out = {key: value for key, value in extra.items() if key not in _NOT_KEPT} | own
    for key, value in own.items():
        if key in ("text_config", "vision_config") and isinstance(extra.get(key), dict):
            out[key] = _with_extra(value, extra[key])
    return out


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
