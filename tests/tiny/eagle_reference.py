"""An EAGLE-3 head in numpy, from its files alone: one row, one token at a time, no cache.

It takes what `config.json` and `model.safetensors` hold in SafeAILab's layout, and the target's
embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def draft(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embedding: np.ndarray,
    states: np.ndarray,
    tokens: np.ndarray,
    places: np.ndarray,
    drafted: np.ndarray,
) -> np.ndarray:
    """Scores [J, V] of the token after each of the newest token and the drafted ones, -inf where
    none is scored.

    Args:
      embedding: [V, D], which a head without one of its own reads.
      states: [L, 3 D], the target's three hidden states at all tokens but the newest.
      tokens: [L + 1], the row with its newest token.
      places: [L, 3], rotary positions of the tokens but the newest: time, height, width.
      drafted: [J - 1], tokens that the head is made to read.
    """
    tensors = {name: leaf.astype(np.float64) for name, leaf in tensors.items()}
    embedding = tensors.get("embed_tokens.weight", embedding)
    norms = {"norm_before_fc": "input_norm.weight"}
    if config.get("norm_before_fc"):
        states = norm(states, tensors[norms["norm_before_fc"]], config)
    hidden = [*(states @ tensors["fc.weight"].T)]
    read, places = [*tokens[1:]], [*places]
    out = []
    for token in (*drafted, None):
        prenorm = layer(
            config, tensors, embedding[np.asarray(read)], np.stack(hidden), np.stack(places)
        )[-1]
        normed = norm(prenorm, tensors["norm.weight"], config)
        out.append(scores(config, tensors, normed))
        if token is not None:
            hidden.append(normed if config.get("norm_output") else prenorm)
            read.append(token)
            places.append(places[-1] + 1)
    return np.stack(out)


def scores(
    config: dict[str, Any], tensors: dict[str, np.ndarray], normed: np.ndarray
) -> np.ndarray:
    """Scores [V] of all tokens; `d2t` says how far a draft token's id is below the target's."""
    words = np.arange(config["draft_vocab_size"])
    if "d2t" in tensors:
        words = words + tensors["d2t"].astype(int)
    whole = np.full(config["vocab_size"], -np.inf)
    whole[words] = tensors["lm_head.weight"] @ normed
    return whole


def layer(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embeds: np.ndarray,
    hidden: np.ndarray,
    places: np.ndarray,
) -> np.ndarray:
    """The layer's output [L, D], each token reading those up to it."""

    def weight(name: str) -> np.ndarray:
        return tensors[f"midlayer.{name}.weight"]

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["head_dim"]
    normed = norm(hidden, weight("hidden_norm"), config)
    both = np.concatenate([norm(embeds, weight("input_layernorm"), config), normed], axis=-1)
    stream = normed if config.get("norm_before_residual") else hidden
    q, k, v = (
        (both @ weight(f"self_attn.{name}_proj").T).reshape(len(both), -1, width)
        for name in ("q", "k", "v")
    )
    if "midlayer.self_attn.q_norm.weight" in tensors:
        q, k = (
            norm(q, weight("self_attn.q_norm"), config),
            norm(k, weight("self_attn.k_norm"), config),
        )
    q, k = rotate(q, places, config), rotate(k, places, config)
    k, v = (np.repeat(leaf, heads // kv_heads, axis=1) for leaf in (k, v))
    attention = np.einsum("tnh,snh->nts", q, k) / np.sqrt(width)
    attention = np.where(np.tri(len(both), dtype=bool), attention, -np.inf)
    attention = np.exp(attention - attention.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)
    read = np.einsum("nts,snh->tnh", attention, v).reshape(len(both), -1)
    stream = stream + read @ weight("self_attn.o_proj").T
    inner = norm(stream, weight("post_attention_layernorm"), config)
    gate = inner @ weight("mlp.gate_proj").T
    return (
        stream
        + (gate / (1 + np.exp(-gate)) * (inner @ weight("mlp.up_proj").T))
        @ weight("mlp.down_proj").T
    )


def norm(x: np.ndarray, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])


def rotate(x: np.ndarray, places: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Half-split rotary embedding of [T, N, H]; the frequencies of each section turn with one axis
    of `places`.
    """
    turns = 1 / config["rope_theta"] ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    rope = config.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or [len(turns), 0, 0]
    axes = np.repeat(np.arange(3), sections)
    if rope.get("mrope_interleaved"):
        axes = np.asarray([i % 3 if i // 3 < sections[i % 3] else 0 for i in range(len(turns))])
    angles = (places[:, axes] * turns)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )
