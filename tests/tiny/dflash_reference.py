"""A DFlash head in numpy, from its files alone: one row, one block at a time, no cache.

It takes what `config.json` and `model.safetensors` hold in z-lab's layout, DeepSeek's or that of
speculators, and the target's embedding and output matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.tiny.eagle_reference import norm, rotate


def draft(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embedding: np.ndarray,
    output: np.ndarray,
    states: np.ndarray,
    newest: int,
    count: int,
    drafted: np.ndarray,
) -> np.ndarray:
    """Scores [J, V] of the J tokens after the newest one, -inf where none is scored.

    Args:
      embedding, output: [V, D], which a head without its own reads.
      states: [L, n D], the target's hidden states at all tokens but the newest.
      newest: The token at slot L.
      count: J, the drafted tokens.
      drafted: The tokens before them but for the first, which a Markov head reads.
    """
    tensors = {name: leaf.astype(np.float64) for name, leaf in tensors.items()}
    embedding = tensors.get("embed_tokens.weight", embedding)
    config, own = {**config, **config.get("transformer_layer_config", {})}, entries(config)
    ahead = own["sample_from_anchor"]
    context = norm(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], config)
    x = embedding[[newest] + [own["mask_token_id"]] * (count - ahead)]
    for index in range(config["num_hidden_layers"]):
        x = layer(config, tensors, f"layers.{index}.", context, x)
    hidden = norm(x, tensors["norm.weight"], config)[0 if ahead else 1 :]
    scores = hidden @ tensors.get("lm_head.weight", output).T
    if own.get("markov_rank"):
        before = tensors["markov_head.markov_w1.weight"][[newest, *drafted]]
        scores = scores + before @ tensors["markov_head.markov_w2.weight"].T
    words = np.arange(scores.shape[1])
    if "d2t" in tensors:
        words = words + tensors["d2t"].astype(int)
    whole = np.full((count, config["vocab_size"]), -np.inf)
    whole[:, words] = scores
    return whole


def entries(config: dict[str, Any]) -> dict[str, Any]:
    """Return the head's own entries, with those that its publisher's classes default to."""
    anchored = config["architectures"] == ["Qwen3DSparkModel"]  # whatever its markov_rank
    anchored |= config.get("speculators_model_type") == "dspark"
    return {"sample_from_anchor": anchored, **config, **config.get("dflash_config", {})}


def states_of(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the target's states that the head reads: 2 is the one after two layers."""
    own = entries(config)
    outputs = own.get("target_layer_ids", [])
    return tuple(own.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in outputs])


def layer(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    prefix: str,
    context: np.ndarray,
    x: np.ndarray,
) -> np.ndarray:
    """The layer's output [T, D]; each of the block's T tokens reads all others, and the context."""

    def weight(name: str) -> np.ndarray:
        return tensors[f"{prefix}{name}.weight"]

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, length = config["head_dim"], len(context)
    normed = norm(x, weight("input_layernorm"), config)
    both = np.concatenate([context, normed])
    places = np.repeat(np.arange(length + len(x))[:, None], 3, axis=1)
    q = (normed @ weight("self_attn.q_proj").T).reshape(len(x), heads, width)
    k, v = (
        (both @ weight(f"self_attn.{name}_proj").T).reshape(len(both), kv_heads, width)
        for name in "kv"
    )
    q = rotate(norm(q, weight("self_attn.q_norm"), config), places[length:], config)
    k = rotate(norm(k, weight("self_attn.k_norm"), config), places, config)
    k, v = (np.repeat(leaf, heads // kv_heads, axis=1) for leaf in (k, v))
    attention = np.einsum("tnh,snh->nts", q, k) / np.sqrt(width)
    attention = np.exp(attention - attention.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)
    read = np.einsum("nts,snh->tnh", attention, v).reshape(len(x), -1)
    x = x + read @ weight("self_attn.o_proj").T
    inner = norm(x, weight("post_attention_layernorm"), config)
    gate = inner @ weight("mlp.gate_proj").T
    up = inner @ weight("mlp.up_proj").T
    return x + (gate / (1 + np.exp(-gate)) * up) @ weight("mlp.down_proj").T
