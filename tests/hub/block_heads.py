"""Twins stand in for the hub's DFlash and DSpark heads, in each of their three layouts; see
`tests.hub.table`.
"""

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
from jaxspec.config.text import FULL, SLIDING
from jaxspec.heads.files import Server
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from tests.hub.table import ENTRIES
from tests.tiny.models import eagle_params, random_params

MIXED = (SLIDING, FULL)


@dataclass(frozen=True)
class BlockTwin:
    """Describe what the repository of a DFlash or DSpark head holds."""

    target: str
    source: str
    """Where its layout was seen."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json (`files/heads.json`), of which sizes, layers and token ids are the
    twin's own."""
    layout: Server = "vllm"
    drafted: int = 0
    """Tokens of the draft vocabulary; 0 for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the head."""
    is_gemma: bool = False
    """Whether its layers are the target's full ones, and config.json is the target's."""
    kinds: tuple[str, ...] = ()
    """Kinds of its two layers; () for layers of one kind."""
    layers: dict[str, Any] = field(default_factory=lambda: _QWEN3)
    """Entries of `transformer_layer_config`."""


_QWEN3 = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
    **{"initializer_range": 0.02, "max_position_embeddings": 40960, "model_type": "qwen3"},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "use_cache": True},
    **{"sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
    "max_window_layers": 5,
}
_GEMMA_31B = _QWEN3 | {"max_position_embeddings": 262144, "model_type": "llama"}
_GEMMA_31B |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
_HEADS = {
    "z-lab/Qwen3-8B-DFlash-b16": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github z-lab/dflash and ai-dynamo/aiconfigurator, its tests; tensors by the "
        "sizes of its file; no file list seen",
        options={"gamma": 15},
    ),
    "RedHatAI/Qwen3-8B-speculator.dflash": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json and tensors: github vllm-project/speculators, models/dflash; "
        "no file list seen",
        layout="speculators",
        drafted=40,
        options={"gamma": 7, "own_embedding": True},
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github ai-dynamo/aiconfigurator, its tests, which name the sizes of the file",
        options={"gamma": 7, "anchored": True, "markov": 4, "confidence": 20}
        | {"own_embedding": True, "own_output": True},
    ),
    "deepseek-ai/dflash_qwen3_8b_block7": BlockTwin(
        "Qwen/Qwen3-8B",
        "config.json: github deepseek-ai/DeepSpec, config/dflash and modeling/dspark/qwen3; no "
        "file list seen",
        options={"gamma": 7, "anchored": True, "own_embedding": True, "own_output": True},
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": BlockTwin(
        "google/gemma-4-12B-it",
        "config.json: the file as it is, in a test of Modular's dspark_gemma4; "
        "tensors: github deepseek-ai/DeepSpec, modeling/dspark/gemma4",
        options={"gamma": 7, "anchored": True, "markov": 4, "confidence": 20}
        | {"own_embedding": True, "own_output": True},
        is_gemma=True,
        kinds=(FULL, FULL),
    ),
    "deepseek-ai/dflash_gemma4_12b_block7": BlockTwin(
        "google/gemma-4-12B-it",
        "config.json: as its sister with DSpark's heads, by github deepseek-ai/DeepSpec, "
        "config/dflash; no file list seen",
        options={"gamma": 7, "anchored": True, "own_embedding": True, "own_output": True},
        is_gemma=True,
        kinds=(FULL, FULL),
    ),
    "z-lab/gemma-4-31B-it-DFlash": BlockTwin(
        "google/gemma-4-31B-it",
        "config.json: copies in three public tests; no file list seen",
        options={"gamma": 15, "window": 2048},
        kinds=MIXED,
    ),
    "z-lab/gemma4-12B-it-DFlash": BlockTwin(
        "google/gemma-4-12B-it",
        "sizes, without embedding and output matrix, by the 1,455,000,120 bytes of its file; "
        "entries as the 31B's, of which public reports confirm the layout; no file list seen",
        options={"gamma": 15, "window": 2048},
        kinds=MIXED,
    ),
    "RedHatAI/gemma-4-31B-it-speculator.dflash": BlockTwin(
        "google/gemma-4-31B-it",
        "config.json: quoted in two public tests; tensors: a public port lists them",
        layout="speculators",
        drafted=40,
        options={"gamma": 7, "own_embedding": True},
        layers=_GEMMA_31B,
    ),
    "RedHatAI/gemma-4-31B-it-speculator.dspark": BlockTwin(
        "google/gemma-4-31B-it",
        "config.json and tensors: Modular's tests of its speculators_common check the "
        "file's values",
        layout="speculators",
        drafted=40,
        options={"gamma": 7, "markov": 4, "confidence": 20, "own_embedding": True, "window": 2049},
        layers=_GEMMA_31B,
    ),
    "rasyosef/gemma-4-E2B-it-dspark": BlockTwin(
        "google/gemma-4-E2B-it",
        "config.json and tensors: github vllm-project/speculators, models/dspark; "
        "no file list seen",
        layout="speculators",
        drafted=40,
        options={"gamma": 5, "anchored": True, "markov": 4, "own_embedding": True, "window": 2049},
    ),
}
HEADS = {name: replace(head, config=ENTRIES[name]) for name, head in _HEADS.items()}
_OWN = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("global_head_dim", "num_global_key_value_heads", "num_key_value_heads"),
    *("num_hidden_layers", "num_target_layers", "mask_token_id"),
    *("dflash_config", "target_layer_ids", "markov_rank", "layer_types", "draft_vocab_size"),
    *("aux_hidden_state_layer_ids", "speculators_config", "speculators_model_type"),
    *("speculators_version", "bos_token_id", "eos_token_id"),
)
"""Entries that depend on sizes, or that a layout adds."""
_INNER = (*_OWN, "sliding_window", "use_sliding_window", "max_window_layers")
"""Entries that may be in `transformer_layer_config`."""


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
    text = replace(text, layer_types=twin.kinds) if twin.kinds else text
    config = replace(config, text_config=text)
    params = named_tensors(eagle_params(config, random_params(found)))
    raw, tensors = kind_of(config).written(config, params, twin.layout, ["Qwen3ForCausalLM"])
    own = {name: raw[name] for name in raw if name in _OWN}
    if "transformer_layer_config" in raw:
        inner = raw["transformer_layer_config"]
        own["transformer_layer_config"] = twin.layers | {k: inner[k] for k in _INNER if k in inner}
    elif not twin.drafted:
        del own["draft_vocab_size"]
    (path / "config.json").write_text(json.dumps(twin.config | own, indent=2) + "\n")
    bits = {
        name: leaf.astype(ml_dtypes.bfloat16) if leaf.dtype.kind == "f" else leaf
        for name, leaf in tensors.items()
    }
    save_file(bits, path / "model.safetensors", metadata={"format": "pt"})
