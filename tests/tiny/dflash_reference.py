"""Compute a DFlash head in numpy, from its files alone: one row, one block at a time, no cache.

It takes what `config.json` and `model.safetensors` hold in z-lab's layout, DeepSeek's or that of
speculators, and the target's embedding and output matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.tiny.eagle_reference import block, capped, gemmas, is_gemma, norm, of_all


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
    """Return scores [J, V] of the J tokens after the newest one, -inf where none is scored.

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
    length = len(context)
    config = gemmas(config) if is_gemma(config) else config
    embedding = embedding * config.get("embed_scale", 1)
    x = embedding[[newest] + [own["mask_token_id"]] * (count - ahead)]
    places = np.repeat(np.arange(length + len(x))[:, None], 3, axis=1)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        normed = norm(x, tensors[f"{prefix}input_layernorm.weight"], config)
        seen = visible(config, own, index, length, len(x))
        x = block(config, tensors, prefix, np.concatenate([context, normed]), x, places, seen)
    hidden = norm(x, tensors["norm.weight"], config)[0 if ahead else 1 :]
    scores = capped(config, hidden @ tensors.get("lm_head.weight", output).T)
    if own.get("markov_rank"):
        before = tensors["markov_head.markov_w1.weight"][[newest, *drafted]]
        scores = scores + before @ tensors["markov_head.markov_w2.weight"].T
    return of_all(config, tensors, scores)


def entries(config: dict[str, Any]) -> dict[str, Any]:
    """Return the head's own entries, with those that its publisher's classes default to."""
    anchored = "DSparkModel" in config["architectures"][0]  # whatever its markov_rank
    anchored |= config.get("speculators_model_type") == "dspark"
    return {"sample_from_anchor": anchored, **config, **config.get("dflash_config", {})}


def visible(
    config: dict[str, Any], own: dict[str, Any], index: int, length: int, count: int
) -> np.ndarray:
    """Return which of L slots and of T tokens of the block the block's tokens read, [T, L + T].

    speculators' window is the slots before the block, z-lab's also counts the newest token.
    """
    seen = np.ones((count, length + count), bool)
    if own.get("layer_types", config["layer_types"])[index] == "full_attention":
        return seen
    window = own.get("sliding_window", config["sliding_window"])
    behind = window - ("speculators_model_type" not in config)
    seen[:, : max(length - behind, 0)] = False
    if own.get("is_causal", not own.get("sliding_window_non_causal", False)):
        seen[:, length:] = np.tri(count, dtype=bool)
    return seen


def states_of(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the target's states that the head reads: 2 is the one after two layers."""
    own = entries(config)
    outputs = own.get("target_layer_ids", [])
    return tuple(own.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in outputs])
