"""DFlash and DSpark heads on the hub, in each of their three layouts; see `tests.hub.table`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
from safetensors.numpy import save_file

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import text_config
from jaxspec.heads.files import Server
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.kinds.dflash import DFlashConfig
from tests.tiny.models import eagle_params, random_params


@dataclass(frozen=True)
class BlockTwin:
    """What the repository of such a head holds."""

    target: str
    source: str
    """Where its layout was seen."""
    config: dict[str, Any]
    """Entries of config.json, of which sizes, layers and token ids are the twin's own."""
    layout: Server = "vllm"
    drafted: int = 0
    """Tokens of the draft vocabulary; 0 for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the head."""
    is_gemma: bool = False
    """Whether its layers are the target's full ones, and config.json is the target's."""


_QWEN3 = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
    **{"initializer_range": 0.02, "max_position_embeddings": 40960, "model_type": "qwen3"},
    **{"max_window_layers": 5, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
    **{"sliding_window": None, "tie_word_embeddings": False, "use_cache": True},
    "use_sliding_window": False,
}
HEADS: dict[str, BlockTwin] = {
    "z-lab/Qwen3-8B-DFlash-b16": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github z-lab/dflash and ai-dynamo/aiconfigurator, its tests; tensors by the "
        "sizes of its file; no file list seen",
        _QWEN3
        | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        }
        | {"block_size": 16, "dtype": "bfloat16", "transformers_version": "4.57.1"},
        options={"gamma": 15},
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json and tensors: github vllm-project/speculators, models/dflash; no file list seen",
        {"architectures": ["DFlashSpeculator"], "block_size": 8, "dtype": "bfloat16"}
        | {"has_no_defaults_at_init": False, "sliding_window_non_causal": False}
        | {"transformers_version": "4.57.6"},
        layout="speculators",
        drafted=40,
        options={"gamma": 7, "own_embedding": True},
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github ai-dynamo/aiconfigurator, its tests, which name the sizes of the file",
        _QWEN3
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512}
        | {"confidence_head_with_markov": True, "enable_confidence_head": True}
        | {"markov_head_type": "vanilla", "dtype": "bfloat16"},
        options={"gamma": 7, "anchored": True, "markov": 4, "confidence": 20}
        | {"own_embedding": True, "own_output": True},
    ),
    "deepseek-ai/dflash_qwen3_8b_block7": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github deepseek-ai/DeepSpec, config/dflash and modeling/dspark/qwen3; no "
        "file list seen",
        _QWEN3
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512}
        | {"enable_confidence_head": False, "dtype": "bfloat16"},
        options={"gamma": 7, "anchored": True, "own_embedding": True, "own_output": True},
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": BlockTwin(
        "google/gemma-4-12B-it",
        "config.json: github deepseek-ai/DeepSpec, config/dspark and modeling/dspark/gemma4; no "
        "file list seen",
        {"sliding_window": 1024, "num_anchors": 512, "target_model_type": "gemma4_unified"}
        | {"confidence_head_with_markov": True, "enable_confidence_head": True}
        | {"target_text_model_type": "gemma4_unified_text", "dtype": "bfloat16"},
        options={"gamma": 7, "anchored": True, "markov": 4, "confidence": 20}
        | {"own_embedding": True, "own_output": True},
        is_gemma=True,
    ),
    "z-lab/gemma-4-31B-it-DFlash": BlockTwin(
        "google/gemma-4-31B-it",
        "config.json: copies in three public tests; no file list seen",
        _QWEN3
        | {"architectures": ["DFlashDraftModel"], "block_size": 16, "dtype": "bfloat16"}
        | {"final_logit_softcapping": 30.0, "use_sliding_window": True, "sliding_window": 2048}
        | {"tie_word_embeddings": True},
        options={"gamma": 15, "window": 2048},
    ),
    "rasyosef/gemma-4-E2B-it-dspark": BlockTwin(
        "google/gemma-4-E2B-it",
        "config.json and tensors: github vllm-project/speculators, models/dspark; no file list seen",
        {"architectures": ["DSparkDraftModel"], "block_size": 5, "dtype": "bfloat16"}
        | {"sliding_window_non_causal": False, "transformers_version": "5.9.0"},
        layout="speculators",
        drafted=40,
        options={"gamma": 5, "anchored": True, "markov": 4, "own_embedding": True, "window": 2049},
    ),
}
_OWN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_hidden_layers", "num_target_layers", "mask_token_id"),
    *("dflash_config", "target_layer_ids", "markov_rank", "layer_types", "draft_vocab_size"),
    *("aux_hidden_state_layer_ids", "speculators_config", "speculators_model_type"),
    *("speculators_version", "bos_token_id", "eos_token_id"),
)
"""Entries that depend on sizes, or that a layout adds."""


def write_block_head(path: Path, twin: BlockTwin, target: Path) -> None:
    """Write a head of two layers and random weights; the target's twin has two layers too."""
    found = read_config(target)
    options = {"mask_token": text_config(found).vocab_size - 5} | twin.options
    config = DFlashConfig.of_target(found, 2, (1,), target_name=twin.target, **options)
    vocabulary = tuple(range(3, 3 + 2 * twin.drafted, 2))
    text = config.text_config
    if twin.is_gemma:
        full = text_config(found)
        text = full.without_window((full.layer_types.index("full_attention"),) * 2)
        text = replace(text, num_hidden_layers=2)
    text = replace(text, draft_vocabulary=vocabulary, tie_word_embeddings=False)
    config = replace(config, text_config=text)
    params = named_tensors(eagle_params(config, random_params(found)))
    raw, tensors = kind_of(config).written(config, params, twin.layout, ["Qwen3ForCausalLM"])
    own = {name: raw[name] for name in raw if name in _OWN or twin.is_gemma}
    for name in ("jaxspec", "sample_from_anchor"):
        own.pop(name, None)
    if "transformer_layer_config" in raw:
        inner = raw["transformer_layer_config"]
        own["transformer_layer_config"] = _QWEN3 | {k: inner[k] for k in _OWN if k in inner}
    elif not twin.drafted:
        del own["draft_vocab_size"]
    (path / "config.json").write_text(json.dumps(twin.config | own, indent=2) + "\n")
    bits = {
        name: leaf.astype(ml_dtypes.bfloat16) if leaf.dtype.kind == "f" else leaf
        for name, leaf in tensors.items()
    }
    save_file(bits, path / "model.safetensors", metadata={"format": "pt"})
