"""Make tiny random models by transformers itself: the oracle that parity is measured against."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

torch = pytest.importorskip(
    "torch", reason="torch is the oracle of parity: install the `parity` extra"
)

from transformers import (  # noqa: E402  (its model classes need torch)
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, IMAGE, PATCHES = 53, 52, 9
TOLERANCE = 1e-4

TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 44},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "rope_theta": 100.0},
}
VISION = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "image_size": 12, "patch_size": 4, "projection_dim": 16},
}
OPT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 44},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    return random_model(LlamaForCausalLM, text_config(changes))


def mistral(**changes: Any) -> MistralForCausalLM:
    return random_model(
        MistralForCausalLM, MistralConfig(**TEXT | {"sliding_window": None} | deepcopy(changes))
    )


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    return random_model(Qwen2ForCausalLM, Qwen2Config(**TEXT | deepcopy(changes)))


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return random_model(Qwen3ForCausalLM, Qwen3Config(**TEXT | {"head_dim": 8} | deepcopy(changes)))


def gemma3(**changes: Any) -> Gemma3ForCausalLM:
    """Return a Gemma 3 whose second of two layers is full."""
    own = {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 2}
    own |= {"query_pre_attn_scalar": 12, "rope_local_base_freq": 10.0}
    return random_model(Gemma3ForCausalLM, Gemma3TextConfig(**TEXT | own | deepcopy(changes)))


GEMMA4 = {
    **{name: value for name, value in TEXT.items() if name != "rope_theta"},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    **{"final_logit_softcapping": 30.0, "sliding_window": 6, "num_hidden_layers": 3},
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
"""Entries of Gemma 4 12B's and 31B's decoders, except for the window and the depth."""


def gemma4(**changes: Any) -> Gemma4ForCausalLM:
    """Return a Gemma 4 of one sliding and two full layers, with its default heads and rotations."""
    model = random_model(Gemma4ForCausalLM, Gemma4TextConfig(**deepcopy(GEMMA4 | changes)))
    soften(model.model.layers)
    return model


E2B = {
    **{"attention_k_eq_v": False, "num_global_key_value_heads": None, "num_key_value_heads": 1},
    **{"num_attention_heads": 8, "head_dim": 16, "global_head_dim": 32, "sliding_window": 6},
    **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY},
    **{"num_hidden_layers": 10, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "rms_norm_eps": 0.01,  # so that factors before norms count
    "layer_types": 2 * (4 * ["sliding_attention"] + ["full_attention"]),
}
"""Entries of E2B's decoder, except for sizes."""
E4B = E2B | {
    **{"num_key_value_heads": 2, "use_double_wide_mlp": False},
    **{"num_hidden_layers": 12, "num_kv_shared_layers": 6, "layer_types": None},
}
"""Entries of E4B's decoder, except for sizes."""


def shares_all_layers(patch: pytest.MonkeyPatch) -> None:
    """Let all layers of an assistant read another model's keys, which transformers 5.23 refuses."""
    modes = property(lambda text: ["reuse"] * text.num_hidden_layers)
    patch.setattr(Gemma4TextConfig, "kv_sharing_modes", modes)


def soften(layers: Any) -> None:
    """Give each layer of a Gemma 4 its own scalar, and small queries.

    No factor shrinks its scores; without small queries softmax would be almost one-hot.
    """
    for i, layer in enumerate(layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * i)
        layer.self_attn.q_norm.weight.data.mul_(0.1)


def opt(**changes: Any) -> OPTForCausalLM:
    return random_model(OPTForCausalLM, OPTConfig(**OPT | changes))


def llava(
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **changes: Any
) -> LlavaForConditionalGeneration:
    """Return a LLaVA whose prompts hold `PATCHES` placeholders `IMAGE` an image."""
    config = LlavaConfig(
        text_config=text_config(text or {}),
        vision_config=CLIPVisionConfig(**VISION | (vision or {})),
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        **changes,
    )
    return random_model(LlavaForConditionalGeneration, config)


def text_config(changes: dict[str, Any]) -> LlamaConfig:
    # transformers writes into the dictionaries it is given
    return LlamaConfig(**TEXT | deepcopy(changes))


def random_model(kind: Any, config: Any) -> Any:
    """Return the model with every parameter drawn, norms and biases too, so that a forgotten or
    swapped one shows.
    """
    torch.manual_seed(0)
    model = kind(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model.eval()


def talkative(model: Any) -> Any:
    """Return the model with its layers' weights doubled: left as drawn, it may write one token over
    and over.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.ndim > 1:
                parameter.mul_(2)
    return model


def hub_tensors(model: Any) -> dict[str, np.ndarray]:
    """Return the model's tensors under the names that the hub's files use."""
    renames = (
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
        (r"^model\.(multi_modal_projector\.|image_newline$)", r"\1"),
    )
    tensors = {}
    for name, tensor in model.state_dict().items():
        if type(model).__name__.startswith(("Llava", "Gemma3ForConditional")):
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
        tensors[name] = tensor.numpy().copy()
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        tensors = {
            name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")
        }
    return tensors


def write(path: Path, model: Any, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Write a checkpoint: by `save_pretrained`, or its config.json and just these tensors."""
    if tensors is None:
        model.save_pretrained(path)
    else:
        model.config.save_pretrained(path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def reload(path: Path, kind: Any) -> Any:
    """Return the model as transformers loads it, in float32: nothing missing, unexpected or of
    another shape.
    """
    model, report = kind.from_pretrained(path, output_loading_info=True, torch_dtype=torch.float32)
    problems = {key: value for key, value in report.items() if value}
    assert not problems
    return model.eval()


def random_params(shapes: Any) -> Any:
    """Return parameters for a tree of shapes: normal(0, 0.2), drawn by numpy because that compiles
    nothing.
    """
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


def images(count: int, seed: int = 0) -> np.ndarray:
    """Return `count` images as the processor gives them: [I, 3, Y, X]."""
    side = VISION["image_size"]
    return np.random.default_rng(seed).normal(size=(count, 3, side, side)).astype(np.float32)


def text(length: int, seed: int = 0) -> list[int]:
    """Return BOS and random tokens, none of them the image placeholder."""
    return [1, *np.random.default_rng(seed).integers(3, IMAGE, length - 1).tolist()]


def logits(model: Any, rows: list[list[int]], pixels: np.ndarray | None = None) -> list[np.ndarray]:
    """Return transformers' logits [L, V] of each row of a right-padded batch."""
    tokens, length = padded(rows)
    mask = np.arange(tokens.shape[1]) < length[:, None]
    inputs = {
        "input_ids": torch.tensor(tokens),
        "attention_mask": torch.tensor(mask.astype(np.int64)),
    }
    if pixels is not None and len(pixels):
        inputs["pixel_values"] = torch.tensor(pixels)
    with torch.no_grad():
        out = model(**inputs).logits.numpy()
    return [row[:n] for row, n in zip(out, length)]


def padded(rows: list[list[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return right-padded tokens [B, L] (with 0) and lengths [B]."""
    length = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(width, length.max())), np.int64)
    for row, values in zip(tokens, rows):
        row[: len(values)] = values
    return tokens, length


def assert_close(ours: Any, theirs: Any, what: str = "") -> None:
    np.testing.assert_allclose(
        np.asarray(ours), np.asarray(theirs), rtol=TOLERANCE, atol=TOLERANCE, err_msg=what
    )
