"""Tokenisers and image processors: transformers' own, read from and written beside a checkpoint.

transformers' Pillow backend is asked for by name, so that pixels are the same with and without torchvision
and neither torch nor torchvision is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.checkpoints.directories import (
    IMAGE_FILES,
    TOKENIZER_FILES,
    check_files,
    installed,
    read_json,
    write_json,
)
from jaxspec.config import LlavaOnevisionConfig, LvlmConfig, ModelConfig, QwenVLConfig, TextConfig
from jaxspec.config.lvlm import MOST_TILES
from jaxspec.config.schema import RULES, Rule, check_fields
from jaxspec.errors import InputError, reading
from jaxspec.models import family_of

_LETTERS = "USER: <image>\nWhat is 1 + 1? \u00fc \u4f60 \U0001f642 ASSISTANT:"
"""A text with letters that a tokeniser may not know."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json and merges.txt")
"""What a tokeniser may be of; the first that is there whole is read."""
_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE_FILES = ("processor_config.json", "chat_template.json")
_SINGLE_TILE_SETTINGS = {
    *("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std"),
    *("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"),
}
_MEND = "use the preprocessor_config.json that belongs to the model"
_RULES = {
    **dict.fromkeys(
        ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), Rule(bool)
    ),
    "image_mean": Rule(float, -1e3, 1e3, (0, 1)),
    "image_std": Rule(float, 1e-6, 1e3, (0, 1)),
    "rescale_factor": Rule(float, 1e-9, 1e3),
    "resample": Rule(int, 0, 5),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "merge_size"), Rule(int, 1, 4096)),
    "image_grid_pinpoints": RULES["image_grid_pinpoints"],
}
_QWEN_EDGES = {"shortest_edge": Rule(int, 1, 1 << 22), "longest_edge": Rule(int, 1, 1 << 25)}
"""The names of Qwen's limits on an image's pixels."""


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory holds a tokeniser that `load_tokenizer` would read."""
    return _first(path, _TOKENIZERS) is not None


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokeniser of a checkpoint directory, a transformers `PreTrainedTokenizerBase`, with its chat template.

    A processor's template counts before the tokeniser's own, as in transformers' `AutoProcessor`.
    Raises `InputError` where the directory holds none or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    # Asked first: given a config.json alone, transformers 5 makes an empty tokeniser and says nothing, and given a
    # vocab.json alone it makes merges up.
    mend = "save it again with save_pretrained"
    if _require(path, _TOKENIZERS, "tokenizer") == "tokenizer.model":
        mend = "put the model's tokenizer.json beside it"
        if lacks := [name for name in ("sentencepiece", "protobuf") if not installed(name)]:
            raise InputError(
                f"{path}: tokenizer.model is read with {lacks[0]}, which is not installed; "
                f"pip install -e '.[sentencepiece]', or {mend}"
            )
    with reading(f"{path}: transformers cannot read the tokenizer", mend):
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        tokenizer.chat_template = _processor_template(Path(path)) or tokenizer.chat_template
    with reading(f"{path}: the tokenizer is read and does not work"):
        tokenizer.decode(
            [
                *tokenizer.encode(_LETTERS),
                *filter(None, (tokenizer.bos_token_id, tokenizer.eos_token_id)),
            ]
        )
    return tokenizer


def _processor_template(path: Path) -> Any | None:
    """Return the chat template in the two files that transformers reads for processors alone, in version 5's order.

    All other places (chat_template.jinja, additional_chat_templates, tokenizer_config.json) are read by tokenisers too.
    """
    for name in _TEMPLATE_FILES:
        if (path / name).is_file():
            found = read_json(path / name).get("chat_template")
            if isinstance(found, list):  # as tokenizer_config.json holds several
                found = {entry["name"]: entry["template"] for entry in found}
            if found is not None:
                return found
    return None


def load_image_processor(path: str | Path, config: ModelConfig | None = None) -> Any:
    """Return the image processor of a checkpoint directory, transformers' own on its Pillow backend.

    Called with `images=[...], return_tensors="np"`, it gives `pixel_values` [I, 3, Y, X], channels first.
    Raises `InputError` where the directory holds none or transformers cannot read it, and where `config` is given and
    the processor does not make what that reads.
    """
    import transformers

    _require(path, _IMAGE_PROCESSORS, "image processor")
    # The same wish in the words of transformers 5 and of transformers 4.
    wish = (
        {"backend": "pil"}
        if int(transformers.__version__.split(".")[0]) >= 5
        else {"use_fast": False}
    )
    with reading(f"{path}: transformers cannot read the image processor"):
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(
                str(path), trust_remote_code=False, **wish
            )
        except Exception:
            _check_torchvision()
            raise
    if config is not None and not isinstance(config, TextConfig):
        check_image_processor(path, processor, config)
    return processor


def check_image_processor(path: str | Path, processor: Any, config: LvlmConfig) -> None:
    """Raise InputError for settings of a directory's processor that cannot be meant, and for images that do not fit."""
    where = f"{path}: image processor"
    settings = processor.to_dict()
    check_fields(where, settings, _RULES)
    edges: dict[str, Rule] = _QWEN_EDGES
    if isinstance(config, QwenVLConfig):
        vision = config.vision_config
        ours = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        theirs = tuple(
            settings.get(name) for name in ("patch_size", "temporal_patch_size", "merge_size")
        )
        if ours != theirs:
            raise InputError(
                f"{where}: cuts patches {theirs}, and config.json says {ours}; {_MEND}"
            )
    else:
        side = config.vision_config.image_size
        names = ("size", "crop_size", "height", "width", "shortest_edge", "longest_edge")
        edges = dict[str, Rule].fromkeys(names, Rule(int, 1, 2 * side))
        for pinpoint in settings.get("image_grid_pinpoints") or ():
            if len(pinpoint) != 2 or pinpoint[0] * pinpoint[1] > MOST_TILES * side**2:
                raise InputError(
                    f"{where}: image_grid_pinpoints {pinpoint} are over {MOST_TILES} tiles; {_MEND}"
                )
    for name in ("size", "crop_size"):
        size = settings.get(name)
        check_fields(where, size if isinstance(size, dict) else {name: size}, edges)
    family = family_of(config.model_type)
    assert family.images is not None
    try:
        with reading("image processor: fails on a blank image", _MEND):
            (tiles,) = family.images(config, processor).read([Image.new("RGB", (64, 48))])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    for name, (shape, _) in family.images.shapes(config).items():
        if tiles[name].shape[1:] != shape or not np.isfinite(tiles[name]).all():
            raise InputError(
                f"{where}: makes of a blank image no {name} of shape {list(shape)}, all finite; {_MEND}"
            )


def _check_torchvision() -> None:
    """Raise InputError where torchvision breaks on import; transformers tells it as if its own class were missing."""
    if find_spec("torchvision") is None:
        return
    mend = "install the one made for the torch that is there, or uninstall it"
    with reading("torchvision is installed and does not work", mend):
        import_module("torchvision")


def single_tile_processor(tiled: Any) -> Any:
    """Return LLaVA-1.5's image processor with sizes and colours of a LLaVA-NeXT one: one tile an image, cropped."""
    import transformers

    known = {key: value for key, value in tiled.to_dict().items() if key in _SINGLE_TILE_SETTINGS}
    # transformers 5 calls its Pillow backend so; transformers 4 has no other class of that name.
    maker = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return maker(**known)


def save_processors(
    path: Path, config: ModelConfig, tokenizer: Any | None, image_processor: Any | None
) -> None:
    """Write the tokeniser and the image processor into `path`, so that transformers 4 and 5 read them.

    With both, and an LVLM, `processor_config.json` makes transformers' `AutoProcessor` work on the directory.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))
        _speak_both_versions(path / "tokenizer_config.json")
    if image_processor is not None:
        image_processor.save_pretrained(str(path))
    if tokenizer is not None and image_processor is not None and not isinstance(config, TextConfig):
        write_json(path / "processor_config.json", _processor(config, tokenizer))


def _processor(config: LvlmConfig, tokenizer: Any) -> dict[str, Any]:
    """Return what transformers' processor class of the family counts an image's placeholders by."""
    if isinstance(config, QwenVLConfig):
        return {"processor_class": "Qwen2_5_VLProcessor"}
    shared = {
        "processor_class": type(config).__name__.removesuffix("Config") + "Processor",
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
        # The class token, which "default" drops again.
        "num_additional_image_tokens": int(config.vision_config.class_token),
        "patch_size": config.vision_config.patch_size,
    }


def copy_processors(
    source: Path, path: Path, config: ModelConfig, tokenizer: Any | None, add_bos: bool
) -> None:
    """Copy tokeniser and, for an LVLM, processor files, made readable for transformers 4 and 5.

    The loaded tokeniser's chat templates, a dictionary, are written where tokenisers and processors of both versions
    look, and nowhere else. With `add_bos` its copy puts BOS in front of texts.
    """
    for name in (*TOKENIZER_FILES, *(() if isinstance(config, TextConfig) else IMAGE_FILES)):
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    if (path / "tokenizer_config.json").is_file():
        _speak_both_versions(path / "tokenizer_config.json")
    whole, images = path / "processor_config.json", path / "preprocessor_config.json"
    if whole.is_file() and not images.is_file():
        nested = read_json(whole).get("image_processor")
        if nested:  # where transformers 5 keeps it, and transformers 4 does not look
            nested["image_processor_type"] = (
                nested["image_processor_type"].removesuffix("Pil").removesuffix("Fast")
            )
            write_json(images, nested)
    if tokenizer is None:
        return
    # Where nothing is said, transformers 4 makes token types too, which none of these models takes.
    changes: dict[str, Any] = {"model_input_names": ["input_ids", "attention_mask"]}
    _rewrite(path / "tokenizer_config.json", changes | ({"add_bos_token": True} if add_bos else {}))
    if add_bos:
        _begin_with_bos(path / "tokenizer.json", tokenizer)
    if not isinstance(config, TextConfig):
        _rewrite(whole, {}, _processor(config, tokenizer))
    for name, text in tokenizer.chat_template.items():
        if Path(name).name != name:
            raise InputError(
                f"{source}: a chat template is called {name!r}; give it a name that a file can have"
            )
        file = path / (
            "chat_template.jinja"
            if name == "default"
            else f"additional_chat_templates/{name}.jinja"
        )
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _rewrite(
    file: Path, entries: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Change entries of a JSON file, which may be missing, and take its chat template out."""
    given = read_json(file) if file.is_file() else {}
    given.pop("chat_template", None)
    write_json(file, {**defaults, **given, **entries})


def _begin_with_bos(file: Path, tokenizer: Any) -> None:
    """Make the tokeniser of a file put BOS in front of texts: transformers 4 goes by nothing else."""
    from tokenizers import Tokenizer, processors

    if not file.is_file() or tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        return
    words, bos = Tokenizer.from_file(str(file)), tokenizer.bos_token
    first = processors.TemplateProcessing(
        [bos, "$A"], [bos, "$A", "$B"], [(bos, tokenizer.bos_token_id)]
    )
    words.post_processor = (
        processors.Sequence([words.post_processor, first]) if words.post_processor else first
    )
    words.save(str(file))


def _speak_both_versions(file: Path) -> None:
    """Rename what transformers 5 writes and transformers 4 refuses; version 5 reads either."""
    raw = read_json(file)
    if raw.get("tokenizer_class") == "TokenizersBackend":
        raw["tokenizer_class"] = "PreTrainedTokenizerFast"
        raw.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(raw.get("extra_special_tokens"), list):
        raw["additional_special_tokens"] = raw.pop("extra_special_tokens")
    write_json(file, raw)


def _require(path: str | Path, files: tuple[str, ...], what: str) -> str:
    """Return the first of these that a directory holds. Raises InputError where there is none."""
    check_files(Path(path))
    found = _first(Path(path), files)
    if found is None:
        raise InputError(
            f"{path}: no {what} (neither {' nor '.join(files)}); copy it there from the model it belongs to"
        )
    return found


def _first(path: Path, files: tuple[str, ...]) -> str | None:
    """Return the first file that is there; of "a and b" both must be."""
    return next(
        (name for name in files if all((path / part).is_file() for part in name.split(" and "))),
        None,
    )
