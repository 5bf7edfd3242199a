"""Compute a Gemma 4's assistant in numpy, from its files alone: one row, a token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def draft(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    keys: dict[str, tuple[np.ndarray, np.ndarray]],
    embedding: np.ndarray,
    state: np.ndarray,
    tokens: list[int],
) -> np.ndarray:
    """Return scores [len(tokens), V] of the tokens after the newest one and after drafted ones.

    Args:
      config: config.json.
      keys: Kind of layer -> keys, rotated, and values [S, K, H] of the target's last layer of that
        kind, of all tokens but the newest.
      embedding: [V, B], the target's embedding, times the root of B.
      state: [B], the target's last hidden state.
      tokens: The newest token, and drafted ones that the assistant is made to read.
    """
    text, out = config["text_config"], []
    tensors = {name: leaf.astype(np.float64) for name, leaf in tensors.items()}
    for token in tokens:
        x = np.concatenate([embedding[token], state]) @ tensors["pre_projection.weight"].T
        for index, kind in enumerate(text["layer_types"]):
            layer = {
                name.removeprefix(f"model.layers.{index}."): leaf
                for name, leaf in tensors.items()
                if name.startswith(f"model.layers.{index}.")
            }
            x = _layer(text, kind, layer, keys[kind], x)
        x = _norm(x, tensors["model.norm.weight"], text["rms_norm_eps"])
        state = x @ tensors["post_projection.weight"].T
        out.append(_scores(config, tensors, x))
    return np.stack(out)


def _layer(
    text: dict[str, Any],
    kind: str,
    layer: dict[str, np.ndarray],
    keys: tuple[np.ndarray, np.ndarray],
    x: np.ndarray,
) -> np.ndarray:
    def normed(name: str, x: np.ndarray) -> np.ndarray:
        return _norm(x, layer[f"{name}.weight"], text["rms_norm_eps"])

    k, v = keys
    newest = len(k)
    if kind == "sliding_attention":
        k, v = (leaf[max(newest - 1 - text["sliding_window"], 0) :] for leaf in (k, v))
    q = normed("input_layernorm", x) @ layer["self_attn.q_proj.weight"].T
    heads = normed("self_attn.q_norm", q.reshape(text["num_attention_heads"], -1))
    heads = _turned(text["rope_parameters"][kind], heads, newest)
    group = len(heads) // k.shape[1]
    outs = []
    for i, head in enumerate(heads):
        scores = k[:, i // group] @ head
        probs = np.exp(scores - scores.max())
        outs.append(probs / probs.sum() @ v[:, i // group])
    out = np.concatenate(outs) @ layer["self_attn.o_proj.weight"].T
    x = x + normed("post_attention_layernorm", out)
    h = normed("pre_feedforward_layernorm", x)
    gate, up = (h @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    out = (gelu * up) @ layer["mlp.down_proj.weight"].T
    return (x + normed("post_feedforward_layernorm", out)) * layer["layer_scalar"]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _turned(rope: dict[str, Any], heads: np.ndarray, position: int) -> np.ndarray:
    """Turn heads [N, H] by a position; in full layers only the first pairs turn."""
    width = heads.shape[-1]
    turning = int(rope.get("partial_rotary_factor", 1) * width // 2)
    for i in range(turning):
        angle = position * rope["rope_theta"] ** (-2 * i / width)
        a, b = heads[:, i].copy(), heads[:, i + width // 2].copy()
        heads[:, i] = a * np.cos(angle) - b * np.sin(angle)
        heads[:, i + width // 2] = b * np.cos(angle) + a * np.sin(angle)
    return heads


def _scores(config: dict[str, Any], tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    scores = tensors["model.embed_tokens.weight"] @ x
    if not config["use_ordered_embeddings"]:
        return scores
    likeliest = np.argsort(-(tensors["masked_embedding.centroids.weight"] @ x))
    groups = tensors["masked_embedding.token_ordering"].astype(int)
    groups = groups.reshape(config["num_centroids"], -1)
    tokens = groups[likeliest[: config["centroid_intermediate_top_k"]]].ravel()
    out = np.full(len(scores), -np.inf)
    out[tokens] = scores[tokens]
    return out
