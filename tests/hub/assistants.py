"""Gemma 4's assistants on the hub; see `tests.hub.table`."""

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
from jaxspec.checkpoints.heads import kind_of
from jaxspec.config import AssistantConfig, Gemma4TextConfig, text_config
from jaxspec.models.heads.kinds import abstract_head


@dataclass(frozen=True)
class AssistantTwin:
    """Describe the repository of an assistant."""

    target: str
    source: str
    """Where its layout was seen."""


ASSISTANTS = {
    "google/gemma-4-12B-it-assistant": AssistantTwin(
        "google/gemma-4-12B-it",
        "names of tensors and entries: transformers 5.23, models/gemma4_unified_assistant; no file "
        "list seen",
    )
}


def write_assistant(path: Path, twin: AssistantTwin, target: Path) -> None:
    """Write an assistant of one layer of each kind and random weights."""
    text = text_config(read_config(target))
    assert isinstance(text, Gemma4TextConfig)
    layers = replace(text, intermediate_size=20, final_logit_softcapping=None)
    config = AssistantConfig(layers, backbone_hidden_size=text.hidden_size)
    rng = np.random.default_rng(0)
    initial = jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.2, x.shape).astype(np.float32), abstract_head(config)
    )
    raw, tensors = kind_of(config).written(config, named_tensors(initial), "vllm", None)
    del raw["jaxspec"]
    raw |= {"dtype": "bfloat16", "transformers_version": "5.23.0"}
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generation = {"num_assistant_tokens": 3, "transformers_version": "5.23.0"}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    bits = {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in tensors.items()}
    save_file(bits, path / "model.safetensors", metadata={"format": "pt"})
