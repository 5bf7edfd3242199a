"""Checkpoints of real shapes, whose zeros take no room, are safetensors headers over sparse
files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from jaxspec.checkpoints.fitting import layouts_of
from jaxspec.config import ModelConfig


def write_zeros(path: Path, config: ModelConfig, shards: int) -> int:
    """Write config.json and `shards` sparse bfloat16 files with their index, and return the bytes
    that the tensors hold.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config.to_hf() | {"dtype": "bfloat16"}))
    layouts, _ = layouts_of(config)
    names, where, total = list(layouts), {}, 0
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, end = {}, 0
        for name in names[number::shards]:
            shape = layouts[name].file_shape
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            where[name] = file
        raw = json.dumps(header).encode()
        with open(path / file, "wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)
        total += end
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    return total
