"""Tokenisers and image processors: transformers' own, read from and written beside a checkpoint.

transformers' Pillow backend is asked for by name, so that pixels are the same with and without torchvision
and neither torch nor torchvision is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.config import LlavaConfig, ModelConfig
from jaxspec.errors import InputError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tokenizer(path: str | Path) -> Any:
    """The tokeniser of a checkpoint directory, a transformers `PreTrainedTokenizerBase`.

    Raises `InputError` where the directory holds none or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    # Asked first: given a config.json alone, transformers 5 makes an empty tokeniser and says nothing.
    _require(path, _TOKENIZER_FILES, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(
            f"{path}: transformers cannot read the tokenizer ({_first_line(error)}); "
            "save it again with save_pretrained"
        ) from error


def load_image_processor(path: str | Path) -> Any:
    """The image processor of a checkpoint directory, transformers' own on its Pillow backend.

    Called with `images=[...], return_tensors="np"`, it gives `pixel_values` [I, 3, Y, X], channels first.
    Raises `InputError` where the directory holds none or transformers cannot read it.
    """
    import transformers

    _require(path, _IMAGE_FILES, "image processor")
    # The same wish in the words of transformers 5 and of transformers 4.
    wish = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(str(path), **wish)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(
            f"{path}: transformers cannot read the image processor ({_first_line(error)}); "
            "save it again with save_pretrained"
        ) from error


def save_processors(
    path: Path, config: ModelConfig, tokenizer: Any | None, image_processor: Any | None
) -> None:
    """Writes the tokeniser and the image processor into `path`, so that transformers 4 and 5 read them.

    With both, and an LVLM, `processor_config.json` makes transformers' `AutoProcessor` work on the directory.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))
        _speak_both_versions(path / "tokenizer_config.json")
    if image_processor is not None:
        image_processor.save_pretrained(str(path))
    if tokenizer is not None and image_processor is not None and isinstance(config, LlavaConfig):
        processor = {
            "processor_class": "LlavaProcessor",
            "image_token": tokenizer.convert_ids_to_tokens(config.image_token_index),
            "num_additional_image_tokens": 1,  # the class token, which "default" drops again
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }
        (path / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")


def _speak_both_versions(file: Path) -> None:
    """Renames what transformers 5 writes and transformers 4 refuses; version 5 reads either."""
    raw = json.loads(file.read_text(encoding="utf-8"))
    if raw.get("tokenizer_class") == "TokenizersBackend":
        raw["tokenizer_class"] = "PreTrainedTokenizerFast"
        raw.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(raw.get("extra_special_tokens"), list):
        raw["additional_special_tokens"] = raw.pop("extra_special_tokens")
    file.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require(path: str | Path, files: tuple[str, ...], what: str) -> None:
    if not any((Path(path) / name).is_file() for name in files):
        raise InputError(
            f"{path}: no {what} (neither {' nor '.join(files)}); copy it there from the model it belongs to"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
