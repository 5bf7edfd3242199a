"""Write quantised files, number by number as the formats define them, with the numbers that they
stand for.

Nothing here is shared with the reader: integers, scales and zero points are drawn first, and the
matrix is computed from these before they are packed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

GROUP = 8
"""Inputs that share a scale here; 128 in the originals."""
BLOCK = (16, 8)
"""Outputs and inputs that share a scale in fp8; [128, 128] in the originals."""
AWQ: dict[str, Any] = {
    **{"bits": 4, "group_size": GROUP, "modules_to_not_convert": ["visual"]},
    **{"quant_method": "awq", "version": "gemm", "zero_point": True},
}
GPTQ: dict[str, Any] = {
    **{"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True},
    **{"damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1}},
    **{"group_size": GROUP, "max_input_length": None, "model_seqlen": None, "pad_token_id": None},
    **{"module_name_preceding_first_block": None, "modules_in_block_to_quantize": None},
    **{"quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True},
    **{"use_cuda_fp16": False, "use_exllama": True},
}
FP8: dict[str, Any] = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    **{"weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head", "model.visual"]},
}
NF4: dict[str, Any] = {
    **{"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16"},
    **{"bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4"},
    **{"bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False},
    **{"llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None},
    **{"llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False},
    **{"quant_method": "bitsandbytes"},
}
NF4_NUMBERS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

Tensors = dict[str, np.ndarray]
_MATRIX = re.compile(r".*layers\.\d+\..*_proj\.weight")


def quantised(tensors: Tensors, entry: dict[str, Any], seed: int = 0) -> tuple[Tensors, Tensors]:
    """Return the tensors of a file whose decoder layers are quantised, and those that they mean.

    Args:
      entry: config.json's quantization_config.
    """
    rng, write = np.random.default_rng(seed), _WRITERS[entry["quant_method"]]
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        if not _MATRIX.fullmatch(name):
            stored[name] = exact[name] = tensor
            continue
        parts, exact[name] = write(*tensor.shape, entry, rng)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": leaf for part, leaf in parts.items()}
        if entry["quant_method"] == "gptq" and f"{module}.bias" not in tensors:
            stored[f"{module}.bias"] = np.zeros(len(tensor), np.float16)
    return stored, exact


def _packed(out: int, ins: int, entry: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return AWQ's or GPTQ's tensors of a matrix, and the numbers that they stand for."""
    bits, awq = entry["bits"], entry["quant_method"] == "awq"
    size = ins if entry["group_size"] == -1 else entry["group_size"]
    each, groups = 32 // bits, -(-ins // size)
    numbers = rng.integers(0, 1 << bits, (ins, out))
    zeros = rng.integers(0, 1 << bits, (groups, out))
    scales = rng.uniform(0.01, 0.2, (groups, out)).astype(np.float16)
    group_of = np.arange(ins) // size
    if entry.get("desc_act"):
        group_of = rng.permutation(group_of)
    exact = np.empty((out, ins), np.float16)
    for row in range(ins):
        for column in range(out):
            group = group_of[row]
            steps = int(numbers[row, column]) - int(zeros[group, column])
            exact[column, row] = np.float16(steps) * scales[group, column]

    def words(values: np.ndarray) -> np.ndarray:
        """Pack along the last axis; the first of a word is in its lowest bits."""
        order = (0, 2, 4, 6, 1, 3, 5, 7) if awq else range(each)
        packed = np.zeros((len(values), values.shape[1] // each), np.uint32)
        for row, line in enumerate(values):
            for word in range(packed.shape[1]):
                for place, column in enumerate(order):
                    number = np.uint32(line[word * each + column])
                    packed[row, word] |= number << np.uint32(bits * place)
        return packed

    qweight = words(numbers) if awq else words(numbers.T).T
    qzeros = words(zeros)
    if not awq and entry.get("checkpoint_format") != "gptq_v2":
        qzeros = qzeros - np.uint32(int("1".zfill(bits // 4) * each, 16))
    parts = {"qweight": qweight, "qzeros": qzeros}
    parts = {name: np.ascontiguousarray(leaf).view(np.int32) for name, leaf in parts.items()}
    parts["scales"] = scales
    if not awq:
        parts["g_idx"] = group_of.astype(np.int32)
    return parts, exact


def _fp8(out: int, ins: int, entry: dict[str, Any], rng: np.random.Generator) -> Any:
    tall, wide = entry["weight_block_size"]
    numbers = rng.normal(0, 100, (out, ins)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.0005, 0.002, (-(-out // tall), -(-ins // wide))).astype(np.float32)
    exact = np.empty((out, ins), ml_dtypes.bfloat16)
    for row in range(out):
        for column in range(ins):
            scale = scales[row // tall, column // wide]
            exact[row, column] = np.float32(numbers[row, column]) * scale
    return {"weight": numbers, "weight_scale_inv": scales}, exact


def _nf4(out: int, ins: int, entry: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return a matrix's NF4 tensors, and the numbers that they stand for: blocks of 64 numbers in
    the order of the file; scales nested in blocks of 256.
    """
    kinds = np.asarray(NF4_NUMBERS, np.float32)
    places, blocks = rng.integers(0, 16, out * ins), -(-out * ins // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
    state["shape"] = [out, ins]
    parts: Tensors = {}
    if entry["bnb_4bit_use_double_quant"]:
        outer_kinds = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.1, 0.2, -(-blocks // 256)).astype(np.float32)
        absmax = rng.integers(0, 256, blocks).astype(np.uint8)
        offset = 0.3017578125
        scales = [
            outer_kinds[kind] * outer[block // 256] + np.float32(offset)
            for block, kind in enumerate(absmax)
        ]
        parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": outer_kinds}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        absmax = scales = rng.uniform(0.1, 0.5, blocks).astype(np.float32)
    exact = np.asarray(
        [kinds[kind] * scales[place // 64] for place, kind in enumerate(places)], np.float32
    )
    pairs = [
        int(places[i]) << 4 | (int(places[i + 1]) if i + 1 < len(places) else 0)
        for i in range(0, len(places), 2)
    ]
    raw = json.dumps(state).encode()
    return parts | {
        "weight": np.asarray(pairs, np.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": kinds,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(raw, np.uint8),
    }, exact.reshape(out, ins).astype(ml_dtypes.bfloat16)


_WRITERS: dict[str, Callable[..., Any]] = {
    "awq": _packed,
    "gptq": _packed,
    "fp8": _fp8,
    "bitsandbytes": _nf4,
}
