"""Twins stand in for Gemma 4's assistants on the hub; see `tests.hub.table`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import Gemma4TextConfig, text_config
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.making import abstract_head

KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class AssistantTwin:
    """Describe the repository of an assistant."""

    target: str
    source: str
    """Where its layout was seen."""
    groups: int = 0
    """Groups of its tokens, of which a few are scored; 0: it scores all tokens."""


_SOURCE = "names of tensors and entries: transformers 5.23, models/{}; no file list seen"
ASSISTANTS = {
    f"{target}-assistant": AssistantTwin(target, _SOURCE.format(models), groups)
    for target, models, groups in (
        ("google/gemma-4-12B-it", "gemma4_unified_assistant", 0),
        ("google/gemma-4-31B-it", "gemma4_assistant", 0),
        ("google/gemma-4-E4B-it", "gemma4_assistant", 8),
        ("google/gemma-4-E2B-it", "gemma4_assistant", 8),
    )
}


def write_assistant(path: Path, twin: AssistantTwin, target: Path) -> None:
    """Write an assistant of one layer of each kind and random weights."""
    text = text_config(read_config(target))
    assert isinstance(text, Gemma4TextConfig)
    layers = replace(text, intermediate_size=20, num_hidden_layers=2, layer_types=KINDS)
    config = AssistantConfig(layers, backbone_hidden_size=text.hidden_size)
    if twin.groups:
        groups = {"num_centroids": twin.groups, "centroid_intermediate_top_k": twin.groups // 2}
        config = replace(config, **groups)
    rng = np.random.default_rng(0)
    initial = jax.tree.map(
        lambda x: (
            rng.normal(x.ndim == 1, 0.2, x.shape).astype(np.float32)
            if x.dtype == np.float32
            else rng.permutation(x.size).astype(x.dtype)
        ),
        abstract_head(config),
    )
    raw, tensors = kind_of(config).written(config, named_tensors(initial), "vllm", ())
    del raw["jaxspec"]
    raw |= {"dtype": "bfloat16", "transformers_version": "5.23.0"}
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generation = {"num_assistant_tokens": 3, "transformers_version": "5.23.0"}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    bits = {
        name: leaf.astype(ml_dtypes.bfloat16) if leaf.dtype.kind == "f" else leaf
        for name, leaf in tensors.items()
    }
    save_file(bits, path / "model.safetensors", metadata={"format": "pt"})
