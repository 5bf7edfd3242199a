"""Read and write transformers' tokenisers and image processors with a checkpoint.

Image processors use transformers' Pillow backend, so that pixels are the same with and without
torchvision, and neither torch nor torchvision is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.checkpoints.directories import (
    IMAGE_FILES,
    TOKENIZER_FILES,
    check_files,
    read_json,
    write_json,
)
from jaxspec.config import (
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    LlavaOnevisionConfig,
    LvlmConfig,
    ModelConfig,
    QwenVLConfig,
    TextConfig,
)
from jaxspec.config.lvlm import MOST_TILES
from jaxspec.errors import InputError, install_command, located, reading
from jaxspec.models.families import family_of
from jaxspec.models.inputs import MEND

_LETTERS = "USER: <image>\nWhat is 1 + 1? \u00fc \u4f60 \U0001f642 ASSISTANT:"
"""A text with letters that a tokeniser may lack."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json and merges.txt")
"""Files of a tokeniser; the first complete entry is read."""
_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE_FILES = ("processor_config.json", "chat_template.json")
_SINGLE_TILE_SETTINGS = {
    *("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std"),
    *("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"),
}
_PATCH_SETTINGS = {
    *("patch_size", "max_soft_tokens", "pooling_kernel_size", "resample", "rescale_factor"),
    *("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "image_mean", "image_std"),
}
QWEN_PIXELS = 1 << 25
"""Maximum pixels of an image that a Qwen processor may ask for."""


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory holds a tokeniser that `load_tokenizer` would read."""
    return _first(path, _TOKENIZERS) is not None


def load_tokenizer(path: str | Path) -> Any:
    """Return a directory's tokeniser, transformers' `PreTrainedTokenizerBase`, with its template.

    A processor's template replaces the tokeniser's own, as in transformers' `AutoProcessor`.
    Raises `InputError` where the directory holds none or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    # transformers 5 makes an empty tokeniser of a config.json, and merges of a vocab.json.
    mend = "save it again with save_pretrained"
    if _require(path, _TOKENIZERS, "tokenizer") == "tokenizer.model":
        install = install_command("sentencepiece")
        mend = f"{install}, or put the model's tokenizer.json there too"
    with reading(f"{path}: transformers cannot read the tokenizer", mend):
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        tokenizer.chat_template = _processor_template(Path(path)) or tokenizer.chat_template
    with reading(f"{path}: the tokenizer is read and does not work"):
        ends = filter(None, (tokenizer.bos_token_id, tokenizer.eos_token_id))
        tokenizer.decode([*tokenizer.encode(_LETTERS), *ends])
    return tokenizer


def _processor_template(path: Path) -> Any | None:
    """Return the chat template of the files that only processors read, in transformers 5's order.

    Tokenisers read all other files: chat_template.jinja, additional_chat_templates,
    tokenizer_config.json.
    """
    for name in _TEMPLATE_FILES:
        if (path / name).is_file():
            template = read_json(path / name).get("chat_template")
            if isinstance(template, list):  # as tokenizer_config.json holds several
                template = {entry["name"]: entry["template"] for entry in template}
            if template is not None:
                return template
    return None


def load_image_processor(path: str | Path, config: LvlmConfig) -> Any:
    """Return a directory's image processor, transformers' own on its Pillow backend.

    Called with `images=[...], return_tensors="np"`, it gives `pixel_values` [I, 3, Y, X], channels
    first.

    config: Model whose tower reads the images.

    Raises `InputError` where the directory holds none, or transformers cannot read it, or it does
    not fit the tower.
    """
    import transformers

    file = Path(path) / _require(path, _IMAGE_PROCESSORS, "image processor")
    # The Pillow backend, in transformers 5 and in transformers 4.
    recent = int(transformers.__version__.split(".")[0]) >= 5
    wish: Any = {"backend": "pil"} if recent else {"use_fast": False}
    with reading(f"{path}: transformers cannot read the image processor"):
        if isinstance(config, Gemma4Config):
            processor = _patch_processor(read_json(file))
        else:
            processor = transformers.AutoImageProcessor.from_pretrained(
                str(path), trust_remote_code=False, **wish
            )
    _check_image_processor(path, processor, config)
    return processor


def _patch_processor(raw: dict[str, Any]) -> Any:
    """Return the image processor of a Gemma 4 with the settings of a file.

    The 12B's own, which has no Pillow backend, makes the same patches.
    """
    settings = raw.get("image_processor", raw)
    options = {key: value for key, value in settings.items() if key in _PATCH_SETTINGS}
    return pillow_class("Gemma4ImageProcessor")(**options)


def _check_image_processor(path: str | Path, processor: Any, config: LvlmConfig) -> None:
    """Raise InputError for a processor that takes gigabytes, or does not make what the tower reads.

    Its sizes are compared with the tower's; all other settings show on a blank image.
    """
    where = f"{path}: image processor"
    settings = processor.to_dict()
    if isinstance(config, QwenVLConfig | Gemma4Config):
        limit = pixels = QWEN_PIXELS
    else:
        side = config.vision_config.image_size
        limit, pixels = 2 * side, MOST_TILES * side**2
    for name in ("size", "crop_size"):
        size = settings.get(name)
        for edge, value in (size if isinstance(size, dict) else {name: size}).items():
            if value is not None and not (isinstance(value, int) and 0 < value <= limit):
                raise InputError(f"{where}: {edge} {value!r}; give 1 to {limit}, or {MEND}")
    with reading(f"{where}: fails on a blank image", MEND), np.errstate(all="ignore"):
        for high, wide in settings.get("image_grid_pinpoints") or ():
            if high * wide > pixels:
                raise ValueError(f"image_grid_pinpoints {high}x{wide}, and at most {pixels} pixels")
        images = family_of(config.model_type).images
        assert images is not None
        with located(path):
            (tiles,) = images(config, processor).read([Image.new("RGB", (64, 48))])
        for name, values in tiles.items():
            if not np.isfinite(values).all():
                raise ValueError(f"{name} is not finite")


def single_tile_processor(tiled: Any) -> Any:
    """Return LLaVA-1.5's processor, one cropped tile per image, with a tiled one's settings."""
    fields = {key: value for key, value in tiled.to_dict().items() if key in _SINGLE_TILE_SETTINGS}
    return pillow_class("CLIPImageProcessor")(**fields)


def pillow_class(name: str) -> Any:
    """Return transformers' class of an image processor, on its Pillow backend."""
    import transformers

    # transformers 5's Pillow backend, else transformers 4's only class.
    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


def save_processors(
    path: Path, config: ModelConfig, tokenizer: Any | None, image_processor: Any | None
) -> None:
    """Write the tokeniser and the image processor so that transformers 4 and 5 read them.

    With both, and an LVLM, `processor_config.json` makes transformers' `AutoProcessor` work on the
    directory.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))
        _speak_both_versions(path / "tokenizer_config.json")
    if image_processor is not None:
        image_processor.save_pretrained(str(path))
        if isinstance(config, Gemma4UnifiedConfig):
            kind = {"image_processor_type": "Gemma4UnifiedImageProcessor"}
            _rewrite(path / "preprocessor_config.json", {}, kind)
    if tokenizer is not None and image_processor is not None and not isinstance(config, TextConfig):
        write_json(path / "processor_config.json", _processor(config, tokenizer))


def _processor(config: LvlmConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the settings by which transformers' processor counts placeholders."""
    kind = config.architecture.removesuffix("ForConditionalGeneration")
    entries = {"processor_class": f"{kind}Processor"}
    if isinstance(config, QwenVLConfig | Gemma4Config):
        return entries
    if isinstance(config, Gemma3Config):
        return entries | {"image_seq_length": config.image_tokens}
    shared = entries | {
        "image_token": tokenizer.convert_ids_to_tokens(config.image_token_index),
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    if isinstance(config, LlavaOnevisionConfig):
        return shared | {
            "video_token": tokenizer.convert_ids_to_tokens(config.video_token_index),
            "num_image_tokens": config.image_tokens,
            "vision_aspect_ratio": config.vision_aspect_ratio,
        }
    return shared | {
        # The class token, which the strategy "default" drops.
        "num_additional_image_tokens": int(config.vision_config.class_token),
        "patch_size": config.vision_config.patch_size,
    }


def copy_processors(
    source: Path,
    path: Path,
    config: ModelConfig,
    tokenizer: Any | None,
    add_bos: bool,
    tokenizer_source: Path | None = None,
) -> None:
    """Copy tokeniser and, for an LVLM, processor files, made readable for transformers 4 and 5.

    Args:
      tokenizer: Tokeniser whose dictionary of chat templates is written to the files that both
        versions read, and to no others.
      add_bos: Make the copy put BOS in front of texts.
      tokenizer_source: Directory of the tokeniser; by default `source`.
    """
    images = () if isinstance(config, TextConfig) else IMAGE_FILES
    for folder, names in ((tokenizer_source or source, TOKENIZER_FILES), (source, images)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, path / name)
    if (path / "tokenizer_config.json").is_file():
        _speak_both_versions(path / "tokenizer_config.json")
    whole, images = path / "processor_config.json", path / "preprocessor_config.json"
    if whole.is_file() and not images.is_file():
        nested = read_json(whole).get("image_processor")
        if nested:  # transformers 5 keeps it here, where transformers 4 does not read it
            with reading(f"{source / whole.name}: image_processor is not readable", MEND):
                if kind := nested.get("image_processor_type"):  # else config.json tells it
                    nested["image_processor_type"] = kind.removesuffix("Pil").removesuffix("Fast")
            write_json(images, nested)
    if tokenizer is None:
        return
    # Without this entry, transformers 4 makes token types too, which these models do not take.
    changes: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
    if add_bos:
        changes["add_bos_token"] = True
        _begin_with_bos(path / "tokenizer.json", tokenizer)
    _rewrite(path / "tokenizer_config.json", {}, changes)
    if not isinstance(config, TextConfig):
        _rewrite(whole, _processor(config, tokenizer), {})
    for name, text in tokenizer.chat_template.items():
        if Path(name).name != name:
            raise InputError(f"{source}: chat template {name!r} is no name of a file; rename it")
        additional = f"additional_chat_templates/{name}.jinja"
        file = path / ("chat_template.jinja" if name == "default" else additional)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _rewrite(file: Path, defaults: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Set entries of a JSON file, which may be missing, and remove its chat template."""
    content = read_json(file) if file.is_file() else {}
    content.pop("chat_template", None)
    write_json(file, {**defaults, **content, **entries})


def _begin_with_bos(file: Path, tokenizer: Any) -> None:
    """Make a tokenizer.json put BOS in front of texts: transformers 4 reads nothing else."""
    from tokenizers import Tokenizer, processors

    if not file.is_file() or tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        return
    backend, bos = Tokenizer.from_file(str(file)), tokenizer.bos_token
    first = processors.TemplateProcessing(
        [bos, "$A"], [bos, "$A", "$B"], [(bos, tokenizer.bos_token_id)]
    )
    backend.post_processor = (
        processors.Sequence([backend.post_processor, first]) if backend.post_processor else first
    )
    backend.save(str(file))


def _speak_both_versions(file: Path) -> None:
    """Rename entries of transformers 5 that transformers 4 refuses; version 5 reads both."""
    raw = read_json(file)
    if raw.get("tokenizer_class") == "TokenizersBackend":
        raw["tokenizer_class"] = "PreTrainedTokenizerFast"
        raw.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(raw.get("extra_special_tokens"), list):
        raw["additional_special_tokens"] = raw.pop("extra_special_tokens")
    write_json(file, raw)


def _require(path: str | Path, files: tuple[str, ...], what: str) -> str:
    """Return the first of these files that a directory holds; InputError without any."""
    check_files(Path(path))
    name = _first(Path(path), files)
    if name is None:
        raise InputError(f"{path}: no {what} (neither {' nor '.join(files)}); copy it there")
    return name


def _first(path: Path, files: tuple[str, ...]) -> str | None:
    """Return the first existing file; "a and b" needs both."""
    return next(
        (name for name in files if all((path / part).is_file() for part in name.split(" and "))),
        None,
    )
