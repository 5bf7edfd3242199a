"""Write LLaVA-1.5 in its own format, and the CLIP that it names: the weights of the hub's converted
twin, under the names, in the files and with the entries that the originals have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.hub import words
from tests.tiny.disk import save_bin

TORCH, SENTENCEPIECE = (find_spec(name) is not None for name in ("torch", "sentencepiece"))
CONVERTED = "llava-hf/llava-1.5-7b-hf"
LLAVA, CLIP = "liuhaotian/llava-v1.5-7b", "openai/clip-vit-large-patch14-336"
CONFIG: dict[str, Any] = {
    **{"_name_or_path": "llava-v1.5-7b", "architectures": ["LlavaLlamaForCausalLM"]},
    **{"bos_token_id": 1, "eos_token_id": 2, "freeze_mm_mlp_adapter": False, "hidden_act": "silu"},
    **{"freeze_mm_vision_resampler": False, "image_aspect_ratio": "pad", "mm_hidden_size": 16},
    **{"image_grid_pinpoints": None, "initializer_range": 0.02, "max_length": 4096},
    **{"max_position_embeddings": 4096, "mm_projector_type": "mlp2x_gelu"},
    **{"mm_resampler_type": None, "mm_use_im_patch_token": False, "mm_use_im_start_end": False},
    **{"mm_vision_select_feature": "patch", "mm_vision_select_layer": -2},
    **{"mm_vision_tower": CLIP, "model_type": "llava", "pad_token_id": 0, "pretraining_tp": 1},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False},
    **{"torch_dtype": "float16", "transformers_version": "4.31.0", "tune_mm_mlp_adapter": False},
    **{"tune_mm_vision_resampler": False, "unfreeze_mm_vision_tower": False, "use_cache": True},
    **{"use_mm_proj": True},
}
"""The 7B's config.json, of which the sizes are the twin's."""
NAMES = (
    (r"^language_model\.", ""),
    (r"^multi_modal_projector\.linear_1", "model.mm_projector.0"),
    (r"^multi_modal_projector\.linear_2", "model.mm_projector.2"),
    (r"^image_newline$", "model.image_newline"),
)


def write_llava(path: Path, converted: Path, spare: int = 0, **changes: Any) -> None:
    """Write the model of a converted directory, without its tower.

    Args:
      spare: Rows of the vocabulary behind the tokeniser's words.
      changes: Entries of config.json.
    """
    ids = words.files("llama2", path, whole=not SENTENCEPIECE)
    text = json.loads((converted / "config.json").read_text())["text_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = CONFIG | {key: text[key] for key in (*sizes, "num_key_value_heads")}
    raw |= {"vocab_size": len(ids) + spare} | changes
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation) + "\n")
    tensors = {}
    for name, tensor in _tensors(converted).items():
        if not name.startswith("vision_tower."):
            for pattern, new in NAMES:
                name = re.sub(pattern, new, name)
            cut = name in ("model.embed_tokens.weight", "lm_head.weight")
            tensors[name] = (
                np.resize(tensor, (len(ids) + spare, *tensor.shape[1:])) if cut else tensor
            )
    names = sorted(tensors)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        write_weights(path, {name: tensors[name] for name in part}, f"-0000{number}-of-00002")


def write_clip(path: Path, converted: Path) -> None:
    """Write the tower of a converted directory as a whole CLIP, in float32."""
    tower = json.loads((converted / "config.json").read_text())["vision_config"]
    raw = {
        **{"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 8},
        **{"logit_scale_init_value": 2.6592, "text_config": {"model_type": "clip_text_model"}},
        "vision_config": tower,
    }
    (path / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    side = tower["image_size"]
    images = {"crop_size": side, "do_center_crop": True, "do_normalize": True, "do_resize": True}
    images |= {"feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "size": side}
    (path / "preprocessor_config.json").write_text(json.dumps(images) + "\n")
    tensors = {
        name.removeprefix("vision_tower."): tensor.astype(np.float32)
        for name, tensor in _tensors(converted).items()
        if name.startswith("vision_tower.")
    }
    tensors |= {"logit_scale": np.ones(()), "visual_projection.weight": np.ones((8, 16))}
    tensors["text_model.embeddings.token_embedding.weight"] = np.ones((9, 16))
    write_weights(path, {name: leaf.astype(np.float32) for name, leaf in tensors.items()})


def _tensors(path: Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def write_weights(path: Path, tensors: dict[str, np.ndarray], shard: str = "") -> None:
    if not TORCH:
        save_file(tensors, path / f"model{shard}.safetensors", metadata={"format": "pt"})
        return
    import torch

    whole = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    save_bin(whole, path / f"pytorch_model{shard}.bin")


ORIGINALS: dict[str, Callable[[Path, Path], None]] = {LLAVA: write_llava, CLIP: write_clip}
