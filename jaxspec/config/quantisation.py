"""Describe how matrices are quantised: the entry `quantization_config` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from jaxspec.errors import InputError

READ = "AWQ, GPTQ, fp8 in blocks and bitsandbytes in 4 bits"
_ENTRIES = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Quantisation:
    """Describe the integers, scales and zero points that stand for a matrix [out, in].

    Fields:
      bits: Bits of a number.
      group: Inputs that share a scale and a zero point; -1 for all inputs.
      zero_offset: What is added to a stored zero point: GPTQ's first format stores one less.
      block: Outputs and inputs that share a scale (fp8).
    """

    method: Literal["awq", "gptq", "fp8", "bitsandbytes"]
    bits: int = 4
    group: int = -1
    zero_offset: int = 0
    block: tuple[int, int] = (128, 128)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Quantisation | None:
        """Return how the model of a config.json is quantised; None if it is not.

        Raises InputError for formats that are not read.
        """
        parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
        entry = next((part[key] for part in parts for key in _ENTRIES if part.get(key)), None)
        if entry is None:
            return None
        if not isinstance(entry, dict):
            raise _refusal(str(entry))
        return _parsed(entry)


def _parsed(entry: Mapping[str, Any]) -> Quantisation:
    """Return the format of a `quantization_config`; InputError for one that this library lacks."""
    method, bits, group = (entry.get(key) for key in ("quant_method", "bits", "group_size"))
    if method == "awq":
        form = str(entry.get("version") or "gemm").lower()
        if form == "gemm" and bits == 4 and _is_group(group):
            return Quantisation("awq", 4, group)
        raise _refusal(f"awq, version {form}, bits {bits}, group_size {group}")
    if method == "gptq":
        form = "marlin" if entry.get("is_marlin_format") else entry.get("checkpoint_format", "gptq")
        if form in ("gptq", "gptq_v2") and bits in (4, 8) and _is_group(group):
            return Quantisation("gptq", bits, group, zero_offset=int(form == "gptq"))
        raise _refusal(f"gptq, checkpoint_format {form}, bits {bits}, group_size {group}")
    if method == "fp8":
        match entry.get("weight_block_size"), entry.get("fmt", "e4m3"):
            case [tall, wide], "e4m3" if _is_count(tall) and _is_count(wide):
                return Quantisation("fp8", 8, block=(tall, wide))
            case block, form:
                raise _refusal(f"fp8, fmt {form}, weight_block_size {block}")
    if method == "bitsandbytes" and entry.get("load_in_4bit"):
        return Quantisation("bitsandbytes")
    raise _refusal(f"{method}, {bits} bits" if bits else str(method))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _is_group(value: object) -> TypeGuard[int]:
    return value == -1 or _is_count(value)


def _refusal(kind: str) -> InputError:
    return InputError(
        f"config.json: the model is quantised ({kind:.80}), and {READ} are read; take one of "
        "those, or the original in float32, float16 or bfloat16"
    )
