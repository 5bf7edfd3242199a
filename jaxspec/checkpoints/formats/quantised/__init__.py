"""Dequantise matrices as they are read: one file a format."""

from __future__ import annotations

from collections.abc import Iterable

from jaxspec.checkpoints.formats.quantised.bitsandbytes import BitsAndBytes
from jaxspec.checkpoints.formats.quantised.fp8 import Fp8
from jaxspec.checkpoints.formats.quantised.matrix import QuantisedMatrix
from jaxspec.checkpoints.formats.quantised.packed import Awq, Gptq
from jaxspec.checkpoints.formats.tensor_files import FLOATS, StoredTensor
from jaxspec.config.quantisation import Quantisation
from jaxspec.errors import collected

FORMATS: dict[str, type[QuantisedMatrix]] = {
    "awq": Awq,
    "gptq": Gptq,
    "fp8": Fp8,
    "bitsandbytes": BitsAndBytes,
}


def dequantised(
    tensors: Iterable[StoredTensor], quantisation: Quantisation, problems: list[str]
) -> list[StoredTensor]:
    """Return the tensors, one for each quantised matrix; misfits go to `problems`."""
    kind = FORMATS[quantisation.method]
    modules: dict[str, dict[str, StoredTensor]] = {}
    out: list[StoredTensor] = []
    for tensor in tensors:
        match = kind.pattern.fullmatch(tensor.name)
        if match is None:
            out.append(tensor)
        else:
            modules.setdefault(match[1], {})[match[match.lastindex or 0]] = tensor
    for module, parts in modules.items():
        if parts.keys() == {"weight"} and parts["weight"].dtype in FLOATS:  # not quantised
            out.append(parts["weight"])
            continue
        with collected(problems):
            out.append(kind.of(f"{module}.weight", quantisation, parts))
    return out
