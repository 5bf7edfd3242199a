"""Compute EAGLE-1 and EAGLE-3 heads in numpy, from their files alone: one row, a token at a time,
no cache.

They take what `config.json` and `model.safetensors` hold in SafeAILab's layouts, DeepSeek's or that
of speculators, and what a head borrows from its target.
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
    images: dict[int, np.ndarray] | None = None,
    output: np.ndarray | None = None,
    rule: str = "placeholder",
) -> np.ndarray:
    """Return scores [J, V] of the token after each of the newest token and the drafted ones, -inf
    where none is scored.

    Args:
      embedding: [V, D], which a head without one of its own reads.
      states: The target's hidden states at all tokens but the newest: [L, D] for EAGLE-1, three
        side by side, [L, 3 D], for EAGLE-3.
      tokens: [L + 1], the row with its newest token.
      places: [L, 3], rotary positions of the tokens but the newest: time, height, width.
      drafted: [J - 1], tokens that the head is made to read.
      images: Slot -> the target's embedding there, [D], of slots that show an image.
      output: [V, D], the target's output matrix, for EAGLE-1.
      rule: The head's rule for images.
    """
    config = config | config.get("transformer_layer_config", {})
    config = gemmas(config) if is_gemma(config) else config
    tensors = {name: leaf.astype(np.float64) for name, leaf in tensors.items()}
    embedding, images = tensors.get("embed_tokens.weight", embedding), images or {}
    embedding = embedding * config.get("embed_scale", 1)
    if output is None:
        tensors = {name.replace("layers.0.", "midlayer."): leaf for name, leaf in tensors.items()}
    if rule == "zero":
        states = np.where(np.isin(np.arange(len(states)), [*images])[:, None], 0, states)
    embeds = [
        images[slot]
        if slot in images and rule in ("embedding", "unfused", "compressed")
        else embedding[token]
        for slot, token in enumerate(np.minimum(tokens, len(embedding) - 1))
    ][1:]
    if output is None:
        return _eagle3(config, tensors, embedding, embeds, states, places, drafted)
    if rule == "compressed":
        return _vispec(config, tensors, embedding, embeds, states, places, drafted, images, output)
    joined = [
        embeds[slot]
        if rule == "unfused" and slot + 1 in images
        else joint(tensors, embeds[slot], states[slot])
        for slot in range(len(states))
    ]
    places, out = [*places], []
    for token in (*drafted, None):
        read = stream = np.stack(joined)
        if "layers.0.input_layernorm.weight" in tensors:  # MSD for Qwen2-VL and Qwen2.5-VL
            read = norm(stream, tensors["layers.0.input_layernorm.weight"], config)
        last = block(config, tensors, "layers.0.", read, stream, places)[-1]
        out.append(output @ last)
        if token is not None:
            joined.append(joint(tensors, embedding[min(token, len(embedding) - 1)], last))
            places.append(places[-1] + 1)
    return np.stack(out)


def states_of(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the target's states that an EAGLE-3 head reads: 2 is the one after two layers."""
    if layers := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layers)
    outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", ())
    return tuple(layer + 1 for layer in outputs or config["target_layer_ids"])


def _vispec(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embedding: np.ndarray,
    embeds: list[np.ndarray],
    states: np.ndarray,
    places: np.ndarray,
    drafted: np.ndarray,
    images: dict[int, np.ndarray],
    output: np.ndarray,
) -> np.ndarray:
    """Return ViSpec's output: an image is a slot where it ends, and what follows reads the image's
    vector with its state.
    """
    image, run = np.zeros(states.shape[1]), []
    read, positions, out = [], [], []

    def text(embed: np.ndarray, state: np.ndarray, position: np.ndarray) -> None:
        state = tensors["img_fc.weight"] @ np.concatenate([state, image])
        read.append(joint(tensors, embed, state + tensors.get("img_fc.bias", 0)))
        positions.append(position)

    for slot, (embed, state) in enumerate(zip(embeds, states)):
        if slot + 1 not in images:
            text(embed, state, places[slot])
            continue
        run.append(embed)
        if slot + 2 not in images:
            first, image = compressed(tensors, np.stack(run))
            read.append(first)
            positions.append(places[slot])
            run = []
    for token in (*drafted, None):
        last = block(config, tensors, "layers.0.", np.stack(read), np.stack(read), positions)[-1]
        out.append(output @ last)
        if token is not None:
            text(embedding[token], last, positions[-1] + 1)
    return np.stack(out)


def compressed(tensors: dict[str, np.ndarray], embeds: np.ndarray) -> np.ndarray:
    """Return the vector that each learned query reads of an image [P, D]."""
    queries = tensors["imadpt.q"]

    def projected(name: str) -> np.ndarray:
        weight = tensors[f"imadpt.{name}_proj.weight"]
        vectors = embeds @ weight.T + tensors.get(f"imadpt.{name}_proj.bias", 0)
        return vectors.reshape(len(embeds), *queries.shape[1:])

    k, v = projected("k"), projected("v")
    scores = np.einsum("qnh,pnh->qnp", queries, k) / np.sqrt(queries.shape[-1])
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    out = np.einsum("qnp,pnh->qnh", probs, v).reshape(len(queries), -1)
    return out @ tensors["imadpt.o_proj.weight"].T


def joint(tensors: dict[str, np.ndarray], embed: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return the vector that EAGLE-1's layer reads of a token."""
    return tensors["fc.weight"] @ np.concatenate([embed, state]) + tensors.get("fc.bias", 0)


def _eagle3(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embedding: np.ndarray,
    embeds: list[np.ndarray],
    states: np.ndarray,
    places: np.ndarray,
    drafted: np.ndarray,
) -> np.ndarray:
    if config.get("norm_before_fc"):
        states = norm(states, tensors["input_norm.weight"], config)
    if config.get("fc_norm"):
        parts = np.split(states, 3, axis=-1)
        weights = [tensors[f"fc_norm.{i}.weight"] for i in range(3)]
        normed = [norm(part, weight, config) for part, weight in zip(parts, weights)]
        states = np.concatenate(normed, axis=-1)
    hidden = [*(states @ tensors["fc.weight"].T)]
    places, out = [*places], []
    for token in (*drafted, None):
        rows = np.stack(embeds), np.stack(hidden), np.stack(places)
        prenorm = layer(config, tensors, *rows, len(states) - 1)[-1]
        normed = norm(prenorm, tensors["norm.weight"], config)
        scores = capped(config, tensors["lm_head.weight"] @ normed)
        out.append(of_all(config, tensors, scores))
        if token is not None:
            hidden.append(normed if config.get("norm_output") else prenorm)
            embeds = [*embeds, embedding[token]]
            places.append(places[-1] + 1)
    return np.stack(out)


def of_all(
    config: dict[str, Any], tensors: dict[str, np.ndarray], scores: np.ndarray
) -> np.ndarray:
    """Return scores [..., V] of all tokens; `d2t` says how far a draft token's id is below the
    target's.
    """
    words = np.arange(scores.shape[-1])
    if "d2t" in tensors:
        words = words + tensors["d2t"].astype(int)
    whole = np.full((*scores.shape[:-1], config["vocab_size"]), -np.inf)
    whole[..., words] = scores
    return whole


def capped(config: dict[str, Any], scores: np.ndarray) -> np.ndarray:
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(scores / cap) if cap else scores


def layer(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    embeds: np.ndarray,
    hidden: np.ndarray,
    places: np.ndarray,
    first: int,
) -> np.ndarray:
    """Return the output [L, D] of EAGLE-3's layer, each token reading those up to it.

    A window is that of the block's first token, at `first`.
    """
    seen = np.tri(len(hidden), dtype=bool)
    if "sliding_attention" in config.get("layer_types", ()):
        seen[first:] &= np.arange(len(hidden)) > first - config["sliding_window"]
    normed = norm(hidden, tensors["midlayer.hidden_norm.weight"], config)
    both = [norm(embeds, tensors["midlayer.input_layernorm.weight"], config), normed]
    stream = normed if config.get("norm_before_residual") else hidden
    read = np.concatenate(both, axis=-1)
    return block(config, tensors, "midlayer.", read, stream, places, seen)


def block(
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    prefix: str,
    read: np.ndarray,
    stream: np.ndarray,
    places: Any,
    seen: np.ndarray | None = None,
) -> np.ndarray:
    """Return the stream [T, D] after attention over `read` [L, width], whose last T are the
    stream's, causal unless `seen` [T, L] says otherwise, and the MLP.
    """
    seen = np.tri(len(read), dtype=bool) if seen is None else seen
    own = slice(len(read) - len(stream), None)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, places, gemma = config["head_dim"], np.stack(places), is_gemma(config)
    q, k, v = (
        times(tensors, f"{prefix}self_attn.{name}_proj", read).reshape(len(read), -1, width)
        for name in ("qkk" if gemma and config["attention_k_eq_v"] else "qkv")
    )
    if f"{prefix}self_attn.q_norm.weight" in tensors:
        q = norm(q, tensors[f"{prefix}self_attn.q_norm.weight"], config)
        k = norm(k, tensors[f"{prefix}self_attn.k_norm.weight"], config)
    if gemma:
        v = norm(v, np.ones(width), config)
    q, k = rotate(q[own], places[own], config), rotate(k, places, config)
    k, v = (np.repeat(leaf, heads // kv_heads, axis=1) for leaf in (k, v))
    attention = np.einsum("tnh,snh->nts", q, k) / (1 if gemma else np.sqrt(width))
    attention = np.where(seen, attention, -np.inf)
    attention = np.exp(attention - attention.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", attention, v).reshape(len(stream), -1)

    def added(out: np.ndarray, name: str) -> np.ndarray:
        """Add an output to the stream; a Gemma 4 norms both outputs, too, and multiplies the sum by
        a number of its own.
        """
        return stream + (norm(out, tensors[f"{prefix}{name}.weight"], config) if gemma else out)

    stream = added(times(tensors, f"{prefix}self_attn.o_proj", out), "post_attention_layernorm")
    before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    inner = norm(stream, tensors[f"{prefix}{before}.weight"], config)
    gate = times(tensors, f"{prefix}mlp.gate_proj", inner)
    active = gate / (1 + np.exp(-gate))
    if gemma:
        active = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    active = active * times(tensors, f"{prefix}mlp.up_proj", inner)
    stream = added(times(tensors, f"{prefix}mlp.down_proj", active), "post_feedforward_layernorm")
    return stream * tensors[f"{prefix}layer_scalar"] if gemma else stream


def times(tensors: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)


def is_gemma(config: dict[str, Any]) -> bool:
    return "Gemma4" in config["architectures"][0]


def gemmas(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a Gemma 4's full layers by the names of a Qwen3's."""
    alike = {"head_dim": config["global_head_dim"], "embed_scale": config["hidden_size"] ** 0.5}
    if config["attention_k_eq_v"]:
        alike["num_key_value_heads"] = config["num_global_key_value_heads"]
    rope = config["rope_parameters"]["full_attention"]
    return config | alike | {"rope_theta": rope["rope_theta"], "rope_scaling": rope}


def norm(x: np.ndarray, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])


def rotate(x: np.ndarray, places: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Turn [T, N, H] by a half-split rotary embedding; the frequencies of each section turn with
    one axis of `places`.
    """
    turns = 1 / config["rope_theta"] ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "proportional":
        turns[int(rope["partial_rotary_factor"] * len(turns)) :] = 0
    sections = rope.get("mrope_section") or [len(turns), 0, 0]
    axes = np.repeat(np.arange(3), sections)
    if rope.get("mrope_interleaved"):
        axes = np.asarray([i % 3 if i // 3 < sections[i % 3] else 0 for i in range(len(turns))])
    angles = (places[:, axes] * turns)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )
