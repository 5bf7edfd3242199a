"""EAGLE-3 heads as files: the layouts that vLLM, SGLang and tpu-inference load.

SafeAILab's and SpecForge's, which this library writes too:

| tensor                                                                  | shape               |
|-------------------------------------------------------------------------|---------------------|
| `fc.weight`                                                             | [D, 3 target D]     |
| `input_norm.weight`                                                     | norm_before_fc      |
| `midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight` | [D]                |
| `midlayer.self_attn.{q,k,v}_proj.weight`                                | [out, 2 D]          |
| `midlayer.self_attn.o_proj.weight`, `midlayer.mlp.*_proj.weight`        | as a Llama's        |
| `norm.weight`                                                           | [D]                 |
| `lm_head.weight`                                                        | [draft words, D]    |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 [draft words]                                               | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

speculators' layer is `layers.0` and its config.json nests the decoder. Readers of `t2d` put the
draft words in the order of their ids, so heads are written in that order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxspec.checkpoints.tensor_files import StoredTensor
from jaxspec.config import KVHeadConfig
from jaxspec.config.eagle import SPECULATORS
from jaxspec.errors import InputError

Engine = Literal["vllm", "sglang", "speculators"]
"""Program that serves a written head."""

_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")


def as_own_head(
    config: KVHeadConfig, stored: Mapping[str, StoredTensor]
) -> tuple[KVHeadConfig, dict[str, StoredTensor]]:
    """Return a public head's configuration and its parameters by this library's names.

    The configuration gets the draft vocabulary of the file's `d2t`, and the embedding if stored.
    """
    text = replace(config.text_config, own_embedding="embed_tokens.weight" in stored)
    if "d2t" in stored:
        offsets = stored["d2t"].read()
        words = np.arange(len(offsets)) + offsets
        whole = np.array_equal(words, np.arange(text.vocab_size))
        text = replace(text, draft_vocabulary=() if whole else tuple(words.tolist()))
    elif text.draft_vocabulary:
        raise InputError("EAGLE-3 head: the files lack d2t, the draft vocabulary; fetch it")
    named = {_LAYER.sub("layers.0.", name): tensor for name, tensor in stored.items()}
    own = {name: tensor for name, tensor in named.items() if name not in ("d2t", "t2d")}
    return replace(config, text_config=text), own


def eagle_tensors(
    config: KVHeadConfig, named: Mapping[str, np.ndarray], engine: Engine = "vllm"
) -> dict[str, np.ndarray]:
    """Return a head's tensors as an engine reads them, from those by this library's names."""
    text = config.text_config
    layer = "layers.0." if engine == "speculators" else "midlayer."
    out = {_LAYER.sub(layer, name): tensor for name, tensor in named.items()}
    words = np.asarray(text.draft_vocabulary or range(text.vocab_size), np.int64)
    order = np.argsort(words)
    out["lm_head.weight"] = np.ascontiguousarray(out["lm_head.weight"][order])
    out["d2t"] = words[order] - np.arange(len(words))
    out["t2d"] = np.isin(np.arange(text.vocab_size), words)
    return out


def eagle_config(
    config: KVHeadConfig,
    dtype: str,
    engine: Engine = "vllm",
    architectures: list[str] | None = None,
) -> dict[str, Any]:
    """Return config.json as an engine reads it.

    Args:
      dtype: Name of the tensors' dtype in torch.
      architectures: The target's classes in transformers.
    """
    raw = config.to_dict() | {"torch_dtype": dtype}
    if engine != "speculators":
        return raw
    outer = ("norm_before_residual", "norm_before_fc", "norm_output", "draft_vocab_size")
    outer += ("eagle_aux_hidden_state_layer_ids", "jaxspec", "torch_dtype")
    inner = {k: v for k, v in raw.items() if k not in (*outer, "eagle_config", "architectures")}
    target_size = inner.pop("target_hidden_size")
    method = {"proposal_type": "greedy", "speculative_tokens": config.gamma}
    return {
        "architectures": [SPECULATORS[0]],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": inner,
        "target_hidden_size": None if target_size == inner["hidden_size"] else target_size,
        "tie_word_embeddings": False,
        **{key: raw[key] for key in outer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": config.target_name, "architectures": architectures or []},
        },
    }


def serve_command(config: KVHeadConfig, path: str, engine: Engine) -> str:
    """Return the command that serves the head's target with the head."""
    target, count = config.target_name or "TARGET", min(config.gamma, 3)
    if engine == "speculators":
        return f"vllm serve {path}"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {path} "
            f"--speculative-num-steps {count} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {count + 1}"
        )
    method = f'{{"method": "eagle3", "model": "{path}", "num_speculative_tokens": {count}}}'
    return f"vllm serve {target} --speculative-config '{method}'"
