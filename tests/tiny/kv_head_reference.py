"""Compute a KV head in PyTorch, from its exported files alone: one block of drafted tokens at a
time, as it is defined.

It takes what `config.json` and `model.safetensors` hold (`jaxspec/heads/kinds/kv_head/__init__.py`)
and the target's last-layer keys and values as they lie in its cache, rotated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu


def run_block(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    embeds: Tensor,
    k: Tensor,
    v: Tensor,
    shown: Any,
    anchor: int,
    before: Tensor,
) -> Tensor:
    """Return final-normed hidden states [J, D] of a block that begins at token `anchor` of the row.

    Args:
      embeds: [J, D], the target's embeddings of the block's tokens. A parallel head reads the first
      alone. k, v: [S, K, H], the target's last layer, or several layers, one behind the other on
      the axis of heads. shown: [S], which image a slot shows, -1 for text. before: [D], the
      target's final-normed hidden state of the token before the anchor.
    """
    context = read_target(config, tensors, k, v, np.asarray(shown), int(anchor))
    if config.get("parallel"):
        stream = torch.cat([embeds[:1], tensors["masks"][: len(embeds) - 1]])
        if config["feature"] != "none":
            stream = (
                torch.cat([stream, before.expand(len(stream), -1)], dim=-1) @ tensors["fc.weight"].T
            )
        return run_layers(config["text_config"], tensors, stream, int(anchor), context)
    if config["feature"] == "none":
        return run_layers(config["text_config"], tensors, embeds, int(anchor), context)
    hidden = [before]
    for step in range(1, len(embeds) + 1):
        fused = torch.cat([embeds[:step], torch.stack(hidden)], dim=-1) @ tensors["fc.weight"].T
        hidden.append(run_layers(config["text_config"], tensors, fused, int(anchor), context)[-1])
    return torch.stack(hidden[1:])


def run_layers(
    text: dict[str, Any],
    tensors: dict[str, Tensor],
    stream: Tensor,
    anchor: int,
    context: tuple[Tensor, ...],
) -> Tensor:
    """Run all layers and the final norm over the tokens from the anchor on."""
    keys, values, bias = context
    places = anchor + torch.arange(len(stream))
    for i in range(text["num_hidden_layers"]):
        part = {
            name.removeprefix(f"layers.{i}."): leaf
            for name, leaf in tensors.items()
            if name.startswith(f"layers.{i}.")
        }
        own = text["num_key_value_heads"] * (
            i if keys.shape[1] > text["num_key_value_heads"] else 0
        )
        read = (leaf[:, own : own + text["num_key_value_heads"]] for leaf in (keys, values))
        stream = run_layer(text, part, stream, places, *read, bias)
    return norm(stream, tensors["norm.weight"], text)


def read_target(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    k: Tensor,
    v: Tensor,
    shown: np.ndarray,
    anchor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [C, K, H] that a block may read of the target, and the bias [C] of
    their scores.
    """
    keys, values, bias = [k[:0]], [v[:0]], [k.new_zeros(0)]
    pooling, slots = config["pooling"], config["image_slots"]
    for image in range(int(shown.max()) + 1 if pooling in ("linear", "attention") else 0):
        (at,) = np.nonzero(shown == image)
        if at.max() >= anchor:
            continue
        if pooling == "attention":
            scores = torch.einsum("ckh,nkh->kcn", tensors["kv_projector.queries"], k[at])
            matrices = [torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)] * 2
        else:
            matrices = [tensors["kv_projector.k"], tensors["kv_projector.v"]]
        for matrix, leaf, out in zip(matrices, (k, v), (keys, values), strict=True):
            every = matrix if matrix.ndim == 3 else matrix.expand(k.shape[1], *matrix.shape)
            out.append(torch.einsum("kcn,nkh->ckh", every, leaf[at]))
        bias.append(
            tensors["slot_bias"].expand(slots) if config["slot_bias"] else k.new_zeros(slots)
        )
    if config["reads_text"]:
        at = np.flatnonzero((np.arange(len(shown)) < anchor) & ((shown < 0) | (pooling == "none")))
        keys.append(k[at])
        values.append(v[at])
        bias.append(k.new_zeros(len(at)))
    return torch.cat(keys), torch.cat(values), torch.cat(bias)


def run_layer(
    text: dict[str, Any],
    part: dict[str, Tensor],
    x: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
) -> Tensor:
    """Run a decoder layer over a block [J, D] that reads what is given and the block's own earlier
    tokens.
    """
    heads, kv_heads, width = (
        text["num_attention_heads"],
        text["num_key_value_heads"],
        text["head_dim"],
    )
    u = norm(x, part["input_layernorm.weight"], text)

    def project(name: str, n: int) -> Tensor:
        out = u @ part[f"self_attn.{name}_proj.weight"].T
        if f"self_attn.{name}_proj.bias" in part:
            out = out + part[f"self_attn.{name}_proj.bias"]
        out, scale = out.reshape(len(u), n, width), part.get(f"self_attn.{name}_norm.weight")
        return out if scale is None else norm(out, scale, text)

    q, k = rotate(project("q", heads), places, text), rotate(project("k", kv_heads), places, text)
    keys, values = torch.cat([keys, k]), torch.cat([values, project("v", kv_heads)])
    keys, values = (leaf.repeat_interleave(heads // kv_heads, dim=1) for leaf in (keys, values))
    scores = torch.einsum("tnh,cnh->ntc", q, keys) / width**0.5
    scores = scores + torch.cat([bias, bias.new_zeros(len(x))])
    order = torch.arange(len(x))
    hidden = torch.zeros(len(x), len(bias) + len(x), dtype=torch.bool)
    hidden[:, len(bias) :] = order[None] > order[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    out = torch.einsum("ntc,cnh->tnh", weights, values).reshape(len(x), -1)
    x = x + out @ part["self_attn.o_proj.weight"].T
    u = norm(x, part["post_attention_layernorm.weight"], text)
    gated = silu(u @ part["mlp.gate_proj.weight"].T) * (u @ part["mlp.up_proj.weight"].T)
    return x + gated @ part["mlp.down_proj.weight"].T


def norm(x: Tensor, weight: Tensor, text: dict[str, Any]) -> Tensor:
    return weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + text["rms_norm_eps"])


def rotate(x: Tensor, places: Tensor, text: dict[str, Any]) -> Tensor:
    """Turn [T, N, H] by a half-split rotary embedding, without scaling of frequencies."""
    inverse = 1 / text["rope_theta"] ** (
        torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1]
    )
    # The frequencies are stored in float32 wherever they are used.
    angles = (places[:, None].double() * inverse.float().double())[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )
