"""Write LLaVA's own format (`liuhaotian/llava-v1.5-7b`) once as a Hugging Face directory.

A directory of this format holds a Llama whose config.json has entries `mm_*`, the projector as
`model.mm_projector.*`, and a tokenizer.model that knows no image. The CLIP tower is named by
`mm_vision_tower`, and only LLaVA-1.6's files contain it. The copy has transformers' names, two more
tokens `<image>` and `<pad>` behind the vocabulary, as the hub's converted models have, and rows of
mean values for these and for padding, which are never likeliest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.fitting import contradictions, in_hub_layout, layouts_of, refuse
from jaxspec.checkpoints.formats.tensor_files import FLOATS, StoredTensor, list_directory
from jaxspec.checkpoints.huggingface import SaveOptions, UnreadParameter, save, write_configs
from jaxspec.checkpoints.processors import load_tokenizer, pillow_class, save_processors
from jaxspec.config import LlamaConfig, LlavaConfig, LlavaNextConfig, VisionConfig
from jaxspec.errors import InputError, located, reading

CONVERSION = 1
"""Version of the conversion: another one is written anew."""
_LAYOUT = (
    (r"^model\.vision_tower\.vision_tower\.", "vision_tower."),
    (r"^model\.mm_projector\.0\.", "multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "multi_modal_projector.linear_2."),
    (r"^model\.image_newline$", "image_newline"),
    (r"^(model|lm_head)\.", r"language_model.\1."),
)
_TOWER = ((r"^vision_model\.", "vision_tower.vision_model."),)
_EMBEDDING, _OUTPUT = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
_ADDED = ("<image>", "<pad>")
_MULTIPLE = 64
"""Rows of the vocabulary are padded to a multiple of this, as in the hub's converted models."""
_FEATURES = {"patch": "default", "cls_patch": "full"}


def tower_name(path: Path) -> str:
    """Return the name of the tower's repository; InputError if config.json has none."""
    name = directories.read_raw_config(path).get("mm_vision_tower")
    if not isinstance(name, str):
        raise InputError(f"{path}/config.json: mm_vision_tower {name!r:.40}; give its CLIP's id")
    return name


def converted(path: Path, tower: Path, name: str, weights: bool = True) -> Path:
    """Return the directory in jaxspec's cache that holds a model; the first call writes it.

    Args:
      tower: Directory of the tower's repository.
      name: Name of the model.
      weights: False writes only configurations, tokeniser and image processor.
    """
    files = [path / "config.json", tower / "config.json"]
    files += [*directories.weight_files(path), *directories.weight_files(tower)] if weights else []
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    made_of = f"{path.resolve()} {tower.resolve()} {states} {weights} {CONVERSION}"
    write = partial(convert, path, tower, weights=weights)
    return directories.written_once(made_of.encode(), "llava", name, write, path)


def convert(
    path: Path,
    tower: Path,
    destination: Path,
    dtype: Any = None,
    overwrite: bool = False,
    weights: bool = True,
) -> LlavaConfig:
    """Write a model with its tower as a Hugging Face directory; return its configuration.

    Args:
      tower: Directory of the tower's repository.
      dtype: Dtype of the stored tensors; None is the decoder's, in which LLaVA runs its tower too.
      weights: False writes only configurations, tokeniser and image processor.

    Raises:
      InputError: as `save`; or for another kind of model, or one that contradicts itself.
    """
    raw, clip = directories.read_raw_config(path), directories.read_json(tower / "config.json")
    with located(path), reading(f"{path}/config.json: not readable", "fetch it again"):
        config = _config(raw, clip.get("vision_config") or clip)
    tokenizer = _tokenizer(path)
    tokens = max(len(tokenizer), config.text_config.vocab_size)
    size = -(-tokens // _MULTIPLE) * _MULTIPLE
    text = replace(config.text_config, vocab_size=size)
    image = tokenizer.convert_tokens_to_ids(_ADDED[0])
    padded = replace(config, text_config=text, image_token_index=image)
    params: dict[str, Any] = {}
    if weights:
        stored = _tensors(path, tower, config)
        dtype = dtype or FLOATS[stored[_EMBEDDING].dtype]
        layouts, tree = layouts_of(padded)

        def parameter(name: str) -> UnreadParameter:
            count = size if name in (_EMBEDDING, _OUTPUT) else 0
            return UnreadParameter(layouts[name], dtype, partial(_read, stored[name], count))

        params = jax.tree.unflatten(tree, [parameter(name) for name in layouts])
    settings = path / "generation_config.json"
    generation = directories.read_json(settings) if settings.is_file() else {}
    options = SaveOptions(dtype=dtype, generation=generation, overwrite=overwrite)
    readers = {"tokenizer": tokenizer, "image_processor": _image_processor(config, clip, raw)}
    if weights:
        save(destination, padded, params, options, **readers)
    else:
        with directories.written_whole(destination, overwrite) as fresh:
            write_configs(fresh, padded, np.float16, options)
            save_processors(fresh, padded, **readers)
    return padded


def _config(raw: Mapping[str, Any], clip: Mapping[str, Any]) -> LlavaConfig:
    """Return the model's configuration, with the vocabulary of the file."""
    kind = str((raw.get("architectures") or ["?"])[0])
    if kind != "LlavaLlamaForCausalLM":
        raise InputError(
            f"config.json: {kind[:60]} in the original LLaVA format, of which Llamas are read; "
            "take the model in Hugging Face layout, whose hub id ends in -hf"
        )
    choices: dict[str, tuple[Any, ...]] = {
        "mm_projector_type": ("mlp2x_gelu",),
        "mm_use_im_start_end": (False, None),
        "mm_use_im_patch_token": (False, None),
        "mm_patch_merge_type": ("flat", "spatial_unpad", None),
        "image_aspect_ratio": ("pad", "square", "anyres", None),
        "mm_vision_select_feature": (*_FEATURES, None),
    }
    for entry, values in choices.items():
        if raw.get(entry) not in values:
            raise InputError(f"config.json: {entry} {raw.get(entry)!r:.40}; give {values[0]!r}")
    fields: dict[str, Any] = {
        "text_config": LlamaConfig.from_hf({**raw, "model_type": "llama"}),
        "vision_config": VisionConfig.from_hf({**clip, "model_type": "clip_vision_model"}),
        "vision_feature_layer": raw.get("mm_vision_select_layer", -2),
        "vision_feature_select_strategy": _FEATURES[raw.get("mm_vision_select_feature") or "patch"],
    }
    if raw.get("image_aspect_ratio") != "anyres":
        return LlavaConfig(**fields)
    pinpoints = raw.get("image_grid_pinpoints")
    with reading(f"config.json: image_grid_pinpoints {pinpoints!r:.60}", "give lists of two sizes"):
        grids = tuple((int(high), int(wide)) for high, wide in pinpoints or ())
    return LlavaNextConfig(**fields, image_grid_pinpoints=grids)


def _tensors(path: Path, tower: Path, config: LlavaConfig) -> dict[str, StoredTensor]:
    """Return the unread tensors of model and tower, by the hub's names."""
    problems: list[str] = []
    stored = in_hub_layout(list_directory(path, problems), _LAYOUT, problems)
    if not any(name.startswith("vision_tower.") for name in stored):
        towers = in_hub_layout(list_directory(tower, problems), _TOWER, problems)
        stored |= {k: tensor for k, tensor in towers.items() if k.startswith("vision_tower.")}
    if problems := problems or contradictions(config, lambda: layouts_of(config)[0], stored):
        refuse(path, problems)
    return stored


def _read(tensor: StoredTensor, rows: int) -> np.ndarray:
    """Return a tensor, with rows of mean values behind it up to a number of rows."""
    numbers = tensor.read()
    if rows <= len(numbers):
        return numbers
    mean = numbers.mean(0, dtype=np.float32, keepdims=True).astype(numbers.dtype)
    return np.concatenate([numbers, np.repeat(mean, rows - len(numbers), 0)])


def _tokenizer(path: Path) -> Any:
    """Return the tokeniser, with the tokens of images and padding.

    It is transformers' general class, which keeps all settings of a tokeniser: its class of Llama's
    forgets `legacy` when it is saved, and then drops the space behind an image.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    llama = load_tokenizer(path)
    added = [AddedToken(word, special=True, normalized=False) for word in _ADDED]
    llama.add_tokens(added, special_tokens=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=llama.backend_tokenizer,
        **{role: getattr(llama, role) for role in ("bos_token", "eos_token", "unk_token")},
        pad_token=_ADDED[1],
        clean_up_tokenization_spaces=False,
        model_max_length=llama.model_max_length,
    )


def _image_processor(config: LlavaConfig, clip: Any, raw: Mapping[str, Any]) -> Any:
    """Return transformers' processor that treats images as LLaVA does.

    LLaVA-1.5 pads an image to a square in CLIP's mean colour; the hub's converted models crop it.
    """
    side = config.vision_config.image_size
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    if isinstance(config, LlavaNextConfig):
        kind = "LlavaNextImageProcessor"
        extra: dict[str, Any] = {"image_grid_pinpoints": config.image_grid_pinpoints}
    else:
        kind, extra = "LlavaImageProcessor", {"do_pad": raw.get("image_aspect_ratio") == "pad"}
    return pillow_class(kind)(**sizes, **extra)
