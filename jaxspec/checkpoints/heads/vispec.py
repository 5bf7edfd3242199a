"""Read and write ViSpec heads: an EAGLE-1 head's files, and a compressor of images.

| tensor                                     | shape                                |
|--------------------------------------------|--------------------------------------|
| those of an EAGLE-1 head                   | see `checkpoints/heads/eagle1.py`    |
| `imadpt.q`                                 | [queries, heads, D / heads]          |
| `imadpt.{k,v}_proj.weight`                 | [D, D], with biases as the layer's   |
| `imadpt.o_proj.weight`                     | [D, D]                               |
| `img_fc.weight`, `img_fc.bias`             | [D, 2 D], optional [D]               |

`img_fc` reads a hidden state and, behind it, an image's vector.
"""

from __future__ import annotations

from dataclasses import replace

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.heads.eagle1 import Eagle1Files
from jaxspec.config import VispecConfig


class VispecFiles(Eagle1Files[VispecConfig]):
    """Read and write EAGLE-1 heads with a compressor."""

    def completed(
        self, config: VispecConfig, stored: dict[str, StoredTensor]
    ) -> tuple[VispecConfig, dict[str, StoredTensor]]:
        config, stored = super().completed(config, stored)
        if "imadpt.q" in stored:
            config = replace(config, queries=stored["imadpt.q"].shape[0])
        return config, stored
