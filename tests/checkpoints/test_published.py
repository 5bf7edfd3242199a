"""The config.json of published models, as the hub holds them, gives their published parameter counts."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import pytest
from jaxspec.checkpoints.directories import read_config
from jaxspec.models import abstract_params

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN_VL = {
    "model_type": "qwen2_5_vl", "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False,
    "sliding_window": 32768, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
QWEN_VISION = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "meta-llama/Llama-3.2-1B": (
        {"model_type": "llama", "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048,
         "intermediate_size": 8192, "max_position_embeddings": 131072, "num_hidden_layers": 16,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
         "rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": 32.0}, "vocab_size": 128256},
        1_235_814_400,
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        QWEN_VL | {"hidden_size": 2048, "intermediate_size": 11008, "max_window_layers": 70, "num_attention_heads": 16,
                   "num_hidden_layers": 36, "num_key_value_heads": 2, "tie_word_embeddings": True,
                   "vision_config": QWEN_VISION | {"out_hidden_size": 2048}, "vocab_size": 151936},
        3_754_622_976,
    ),
    "facebook/opt-350m": (
        {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16,
         "num_hidden_layers": 24, "do_layer_norm_before": False, "word_embed_proj_dim": 512},
        331_196_416,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(tmp_path, name):
    raw, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shapes = jax.tree.leaves(abstract_params(read_config(tmp_path)))
    assert sum(math.prod(leaf.shape) for leaf in shapes) == count
