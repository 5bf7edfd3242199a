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
| `midlayer.self_attn.{q,k}_norm.weight`                                  | optional (Qwen3's)  |
| `lm_head.weight`                                                        | optional, [words, D] |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 or int32 [draft words]                                      | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

speculators' layer is `layers.0` and its config.json nests the decoder. Readers of `t2d` put the
draft words in the order of their ids, so heads are written in that order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.checkpoints.tensor_files import StoredTensor
from jaxspec.config import EagleConfig, KVHeadConfig
from jaxspec.config.eagle import SPECULATORS, counted
from jaxspec.errors import InputError

Engine = Literal["vllm", "sglang", "speculators"]
"""Program that serves a written head."""

_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_NUMBER = re.compile(r"layers\.(\d+)\.")


def as_own_head(
    config: KVHeadConfig, stored: Mapping[str, StoredTensor]
) -> tuple[KVHeadConfig, dict[str, StoredTensor]]:
    """Return a public head's configuration and its parameters by this library's names.

    The configuration gets the draft vocabulary of the file's `d2t`, and learns which of the
    optional tensors are stored. A head without an output matrix uses the target's.

    Raises InputError for a draft vocabulary that is not a list of the target's tokens, and for
    heads with more layers, or with states of more target layers.
    """
    named = {_LAYER.sub("layers.0.", name.removeprefix("model.")): stored[name] for name in stored}
    text: Any = replace(
        config.text_config,
        own_embedding="embed_tokens.weight" in named,
        own_output="lm_head.weight" in named,
        qk_norm="layers.0.self_attn.q_norm.weight" in named,
    )
    depth = 1 + max((int(layer[1]) for name in named if (layer := _NUMBER.match(name))), default=0)
    if depth > 1:
        raise InputError(f"EAGLE-3 head: has {depth} layers; give a head with one")
    if "fc.weight" in named:
        width = math.prod(named["fc.weight"].shape[1:])
        count, rest = divmod(width, max(text.target_hidden_size, 1))
        if count != 3 and not rest:
            raise InputError(f"EAGLE-3 head: reads {counted(count)} target layers; give three")
    if "d2t" in named:
        text = replace(text, draft_vocabulary=_draft_words(named["d2t"], text))
    elif text.draft_vocabulary:
        raise InputError("EAGLE-3 head: the files lack d2t, the draft vocabulary; fetch it")
    own = {name: tensor for name, tensor in named.items() if name not in ("d2t", "t2d")}
    return replace(config, text_config=text), own


def _draft_words(offsets: StoredTensor, text: EagleConfig) -> tuple[int, ...]:
    """Return the target's ids of a head's draft tokens; () for all tokens in their order."""
    wrong = f"{offsets.file}: d2t {offsets.dtype} {list(offsets.shape)}"
    size = len(text.draft_vocabulary) or None
    if len(offsets.shape) != 1 or not offsets.whole_numbers:
        raise InputError(f"{wrong} is not a list of integers; fetch the head again")
    count = offsets.shape[0]
    if size not in (None, count) or not 0 < count <= text.vocab_size:
        wanted = size or f"1 to {text.vocab_size}"
        raise InputError(f"{wrong} has not {wanted} tokens, as config.json says; fetch both again")
    words = np.arange(count) + offsets.read()
    if words.min() < 0 or words.max() >= text.vocab_size:
        worst = words.min() if words.min() < 0 else words.max()
        raise InputError(f"{wrong} names token {worst} of {text.vocab_size}; fetch the head again")
    if len(np.unique(words)) < count:
        raise InputError(f"{wrong} names a token twice; fetch the head again")
    return () if np.array_equal(words, np.arange(text.vocab_size)) else tuple(words.tolist())


def eagle_tensors(
    config: KVHeadConfig, named: Mapping[str, np.ndarray], engine: Engine = "vllm"
) -> dict[str, np.ndarray]:
    """Return a head's tensors as an engine reads them, from those by this library's names."""
    text = config.text_config
    layer = "layers.0." if engine == "speculators" else "midlayer."
    out = {_LAYER.sub(layer, name): tensor for name, tensor in named.items()}
    words = np.asarray(text.draft_vocabulary or range(text.vocab_size), np.int64)
    order = np.argsort(words)
    if "lm_head.weight" in out:
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


def check_engine(source: Path, config: KVHeadConfig, engine: Engine) -> None:
    """Raise InputError for a head of whose files the engine would leave a part out."""
    text = config.text_config
    assert isinstance(text, EagleConfig)
    lacking = ["qk_norm"]
    if engine == "sglang":
        lacking += ["norm_before_residual", "norm_before_fc", "norm_output"]
    if names := [name for name in lacking if getattr(text, name)]:
        raise InputError(f"{source}: has {', '.join(names)}, which {engine} does not read")
    if engine == "sglang" and 0 in text.target_layers:
        raise InputError(f"{source}: reads the target's embedding, and sglang only layers' outputs")


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
