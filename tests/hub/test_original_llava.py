"""LLaVA in its own format is read by its id, and written as the hub's converted model is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from jaxspec import LoadedModel
from jaxspec.checkpoints.directories import weight_files
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.checkpoints.formats import original_llava
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.locating import fetch_checkpoint, locate
from jaxspec.checkpoints.processors import load_tokenizer, pillow_class
from jaxspec.cli import main
from jaxspec.errors import InputError
from tests import tiny
from tests.hub.conftest import load_twin
from tests.hub.original import CLIP, CONVERTED, LLAVA, write_llava, write_weights

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def model(cache: Path, offline_hub: Path) -> LoadedModel:
    return LoadedModel.load(LLAVA)


def unpadded(params: Any, words: int) -> Any:
    """Return the parameters without rows behind the tokeniser's words."""

    def cut(path: Any, leaf: Any) -> Any:
        vocabulary = len(path) > 1 and path[-2].key in ("embed_tokens", "lm_head")
        return np.asarray(leaf)[:words] if vocabulary else np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(cut, params)


def test_it_is_the_converted_model(model: LoadedModel) -> None:
    twin = load_twin(CONVERTED)
    words = len(model.tokenizer) - 2
    equal = np.testing.assert_array_equal
    jax.tree.map(equal, unpadded(model.params, words), unpadded(twin.params, words))
    assert model.config.text_config.vocab_size == -(-(words + 2) // 64) * 64
    assert model.config.image_token_index == twin.config.image_token_index == words
    assert model.config.vision_config == twin.config.vision_config
    head = np.asarray(model.params["language_model"]["lm_head"]["weight"], np.float32)
    np.testing.assert_allclose(head[words], head[:words].mean(0), atol=1e-3)
    assert model.settings is not None
    assert model.settings.stop == 2


def test_a_text_is_read_in_parts_as_llava_does(model: LoadedModel) -> None:
    """A text is read in parts as LLaVA does: what precedes and what follows an image are texts of
    their own, each with a first space.
    """
    before, after = "USER: ", "\nWhat is it? ASSISTANT:"
    llama = load_tokenizer(fetch_checkpoint(LLAVA))
    parts = [llama(part).input_ids for part in (before, after)]
    ids = [*parts[0], model.config.image_token_index, *parts[1][1:]]
    assert model.tokenizer(f"{before}<image>{after}").input_ids == ids


def test_images_are_padded_to_a_square_in_the_mean_colour(model: LoadedModel) -> None:
    """Images are padded to a square in the mean colour, as LLaVA's own code does, and not cropped
    as the converted models do.
    """
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (90, 140, 3), np.uint8))
    square = Image.new("RGB", (140, 140), (122, 116, 104))
    square.paste(image, (0, 25))
    kind = pillow_class("CLIPImageProcessor")
    side = model.config.vision_config.image_size
    clip = kind(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    pixels = clip(images=[square], return_tensors="np")["pixel_values"]
    assert model.images is not None
    (tile,) = model.images.read([image])
    np.testing.assert_allclose(tile["pixels"], pixels.transpose(0, 2, 3, 1), atol=1e-6)


def test_a_plan_reads_no_weights(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "small"))
    main(["plan", LLAVA, "--draft", CONVERTED, "--chips", "h100"])
    assert "speed-up" in capsys.readouterr().out
    assert LoadedModel.without_weights(LLAVA).image_processor is not None
    assert not [*(cache / "small").rglob("*.safetensors")]


def test_the_next_version_has_tiles_and_its_own_tower(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """LLaVA-1.6 in its own format has tiles, and its files hold the tower, under a longer name."""
    converted = fetch_checkpoint("llava-hf/llava-v1.6-vicuna-7b-hf")
    path, out = tmp_path / "original", tmp_path / "out"
    path.mkdir()
    pinpoints = json.loads((converted / "config.json").read_text())["image_grid_pinpoints"]
    grids = {"image_aspect_ratio": "anyres", "image_grid_pinpoints": pinpoints}
    write_llava(path, converted, **grids, mm_patch_merge_type="spatial_unpad")
    twin = load(converted)
    for suffix in (".bin", ".safetensors"):
        for number, file in enumerate(sorted(path.glob(f"*{suffix}")), 1):
            file.rename(
                file.with_name(file.name.replace(f"{number}-of-00002", f"{number}-of-00003"))
            )
    tower = named_tensors({"vision_tower": twin.params["vision_tower"]})
    write_weights(path, {f"model.vision_tower.{k}": v for k, v in tower.items()}, "-00003-of-00003")
    assert "holds the checkpoint that is read" in refusal("import", path, path, "--overwrite")
    tower_copy = shutil.copytree(fetch_checkpoint(CLIP), tmp_path / "clip")
    entries = json.loads((path / "config.json").read_text()) | {"mm_vision_tower": str(tower_copy)}
    (path / "config.json").write_text(json.dumps(entries))
    assert "holds the checkpoint that is read" in refusal("import", path, tower_copy, "--overwrite")
    main(["import", str(path), str(out)])
    model = load(out)
    assert model.config.model_type == "llava_next"
    words = model.config.image_token_index
    equal = np.testing.assert_array_equal
    jax.tree.map(equal, unpadded(model.params, words), unpadded(twin.params, words))


def test_a_changed_tower_makes_another_copy(cache: Path, tmp_path: Path) -> None:
    (path := tmp_path / "original").mkdir()
    tower = shutil.copytree(fetch_checkpoint(CLIP), tmp_path / "clip")
    write_llava(path, fetch_checkpoint(CONVERTED), mm_vision_tower=str(tower))
    copies = [locate(path), locate(path)]
    for file in weight_files(tower):
        os.utime(file, (0, 0))
    copies.append(locate(path))
    assert copies[0] == copies[1] != copies[2]


def test_it_may_be_the_working_directory(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "original").mkdir()
    write_llava(path, fetch_checkpoint(CONVERTED))
    monkeypatch.chdir(path)
    assert locate(".", files=("*.json",)).name == "original"


def test_a_vocabulary_with_spare_rows_keeps_them(tmp_path: Path) -> None:
    """A vocabulary with more rows than the tokeniser's words and the two new ones keeps them,
    padded to a multiple of 64.
    """
    (path := tmp_path / "original").mkdir()
    write_llava(path, fetch_checkpoint(CONVERTED), spare=200)
    original_llava.convert(path, fetch_checkpoint(CLIP), tmp_path / "out")
    raw = json.loads((path / "config.json").read_text())
    model = load(tmp_path / "out")
    size = model.config.text_config.vocab_size
    assert size == -(-raw["vocab_size"] // 64) * 64 > model.config.image_token_index + 64


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"architectures": ["LlavaQwenForCausalLM"]}, "LlavaQwenForCausalLM in the original LLaVA"),
        ({"mm_projector_type": "linear"}, "mm_projector_type 'linear'; give 'mlp2x_gelu'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end True; give False"),
        ({"rope_scaling": 2.0}, "config.json: not readable ("),
        ({"num_hidden_layers": 3}, "language_model.model.layers.2.input_layernorm.weight is miss"),
    ],
)
def test_others_are_one_line(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    (path := tmp_path / "original").mkdir()
    write_llava(path, fetch_checkpoint(CONVERTED), **changes)
    tower = fetch_checkpoint(CLIP)
    said = tiny.one_line(original_llava.convert, path, tower, tmp_path / "out")
    assert line in said
    assert str(path) in said


def test_a_model_without_a_tower_is_one_line(tmp_path: Path) -> None:
    raw = {"mm_projector_type": "mlp2x_gelu", "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"config\.json: mm_vision_tower None; give its CLIP's id"):
        locate(tmp_path)


def test_its_directory_is_read_once(model: LoadedModel) -> None:
    assert locate(LLAVA) == locate(LLAVA)
    assert locate(LLAVA).name == "llava-v1.5-7b"
