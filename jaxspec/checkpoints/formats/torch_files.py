"""List the tensors of a .bin of torch.save, and the position of their numbers.

torch's weights-only unpickler reads the file's pickle, on the device "meta": it makes
only tensors, which have shapes and no numbers. torch is imported only for this.
"""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

_AGAIN = "load it with weights_only=True, and torch.save a dictionary of contiguous tensors"
_NAMES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"},
    **{"int64": "I64", "int32": "I32", "uint8": "U8"},
}
"""Safetensors' names of torch's dtypes."""


def list_torch_file(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return dtype, shape, first byte and number of bytes of each tensor of a file of torch.save.

    Raises InputError unless the file is a dictionary of only tensors, and other errors if it
    cannot be read.
    """
    with open(file, "rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            raise InputError(f"{file}: not as torch writes files since 1.6; {_AGAIN}")
    torch = _imported_torch()
    try:
        with warnings.catch_warnings(action="ignore"):  # about damage, which is reported below
            content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"code ({match[1]}), and none of it was run" if match else "more than tensors"
        raise InputError(
            f"{file}: holds {what}; take the model's safetensors, or another model"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in content.values()
    ):
        raise InputError(f"{file}: holds more than a dictionary of tensors; {_AGAIN}")
    size, tensors = file.stat().st_size, {}
    for name, tensor in content.items():
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise InputError(f"{file}: {str(name)[:60]!r} is not in row-major order; {_AGAIN}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset = (
            tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
        )
        if offset + tensor.nbytes > size:
            raise ValueError(f"{name} of {tensor.nbytes} bytes would end behind it")
        tensors[name] = _NAMES.get(dtype, dtype), tuple(tensor.shape), offset, tensor.nbytes
    return tensors


def _imported_torch() -> Any:
    """Return torch, also where the command has hidden it from transformers."""
    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]
    import torch  # pyright: ignore[reportMissingImports]

    return torch
