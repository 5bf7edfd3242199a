"""Whether an image processor makes what the tower reads: its settings, by a table, and then a blank page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.checkpoints.border import reading
from jaxspec.config import LvlmConfig, QwenVLConfig
from jaxspec.config.schema import RULES, Rule, check_fields
from jaxspec.errors import InputError
from jaxspec.models import family_of

_MEND = "use the preprocessor_config.json that belongs to the model"
_RULES = {
    **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), Rule(bool)),
    "image_mean": Rule(float, -1e3, 1e3, (0, 1)),
    "image_std": Rule(float, 1e-6, 1e3, (0, 1)),
    "rescale_factor": Rule(float, 1e-9, 1e3),
    "resample": Rule(int, 0, 5),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "merge_size"), Rule(int, 1, 4096)),
    "image_grid_pinpoints": RULES["image_grid_pinpoints"],
}
_MOST_TILES = 100
_QWEN_EDGES = {"shortest_edge": Rule(int, 1, 1 << 22), "longest_edge": Rule(int, 1, 1 << 25)}
"""The names of Qwen's limits on an image's pixels."""


def check_pages(path: str | Path, processor: Any, config: LvlmConfig) -> None:
    """Raises InputError for settings of a directory's processor that cannot be meant, and for pages that do not fit."""
    where = f"{path}: image processor"
    settings = processor.to_dict()
    check_fields(where, settings, _RULES)
    edges: dict[str, Rule] = _QWEN_EDGES
    if isinstance(config, QwenVLConfig):
        vision = config.vision_config
        ours = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        theirs = tuple(settings.get(name) for name in ("patch_size", "temporal_patch_size", "merge_size"))
        if ours != theirs:
            raise InputError(f"{where}: cuts patches {theirs}, and config.json says {ours}; {_MEND}")
    else:
        side = config.vision_config.image_size
        names = ("size", "crop_size", "height", "width", "shortest_edge", "longest_edge")
        edges = dict[str, Rule].fromkeys(names, Rule(int, 1, 2 * side))
        for pinpoint in settings.get("image_grid_pinpoints") or ():
            if len(pinpoint) != 2 or pinpoint[0] * pinpoint[1] > _MOST_TILES * side**2:
                raise InputError(f"{where}: image_grid_pinpoints {pinpoint} are over {_MOST_TILES} tiles; {_MEND}")
    for name in ("size", "crop_size"):
        size = settings.get(name)
        check_fields(where, size if isinstance(size, dict) else {name: size}, edges)
    family = family_of(config.model_type)
    assert family.images is not None
    try:
        with reading("image processor: fails on a blank page", _MEND):
            (units,) = family.images(config, processor).read([Image.new("RGB", (64, 48))])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    for name, (shape, _) in family.images.shapes(config).items():
        if units[name].shape[1:] != shape or not np.isfinite(units[name]).all():
            raise InputError(f"{where}: makes of a blank page no {name} of shape {list(shape)}, all finite; {_MEND}")
