"""EAGLE-1 heads are read, written, or refused, and the rule for images of published ones is
known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.huggingface import SaveOptions
from jaxspec.cli import main
from jaxspec.cli.inspect import inspect
from jaxspec.config import LlamaConfig, RopeScaling
from jaxspec.errors import InputError
from jaxspec.heads.kinds.eagle1 import Eagle1Config
from jaxspec.heads.loading import is_head, list_head, load_head, read_draft_config, save_head
from jaxspec.publishing.export import Target, export
from tests import tiny

TEXT = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MSD = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava",
    "mm_projector_type": "mlp2x_gelu",
    "jaxspec": None,
}
"""Entries of MSD's config.json; None leaves one out."""
MSD_QWEN = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "use_sliding_window": False,
    "sliding_window": 32768,
    "vision_config": {"depth": 32, "hidden_size": 3584},
    "jaxspec": None,
}
"""Entries of MSD's config.json for Qwen2-VL and Qwen2.5-VL, whose layer is a whole Qwen2 layer."""


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return a head with an embedding and biases of its own, for 36 of the target's 40 tokens."""
    config = Eagle1Config.of_target(TEXT, images="unfused", gamma=3)
    own = {"own_embedding": True, "rows": 36, "fc_bias": True, "qkv_bias": True}
    config = replace(config, text_config=replace(config.text_config, **own))
    save_head(tmp_path / "head", config, tiny.eagle_params(config, {}), None)
    return tmp_path / "head"


def test_an_export_is_read_as_it_was(head: Path, tmp_path: Path) -> None:
    main(["export", str(head), str(tmp_path / "out"), "--draft-images", "zero"])
    (one, params), (other, exported) = load_head(head), load_head(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, params, exported)
    assert (one.images, other.images) == ("unfused", "zero")
    assert replace(other, images="unfused") == one
    assert one.for_target(TEXT).text_config.vocab_size == 40
    assert one.for_target(TEXT).for_target(TEXT) == one.for_target(TEXT)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "zero" in card


@pytest.mark.parametrize(
    ("name", "entries", "rule"),
    [
        ("lucylyn--MSD-LLaVA1.5-7B", MSD, "unfused"),
        ("MSD-LLaVA1.5-13B", MSD, "unfused"),
        ("Cloudriver--EAGLE-LLaVA-1.5-7B", {"jaxspec": None, "draft_vocab_size": 36}, "embedding"),
        ("my-copy", MSD, "unfused"),
        ("my-copy", MSD_QWEN, "unfused"),
        ("Cloudriver--EAGLE-Qwen2-VL", MSD_QWEN, "embedding"),
        ("owner--head", {"jaxspec": None}, "placeholder"),
        ("lucylyn--MSD-LLaVA1.5-7B", {}, "unfused"),
        ("owner--head", {"jaxspec": {"images": "embedding"}}, "embedding"),
    ],
)
def test_the_rule_for_images_is_the_files_or_the_ids(
    name: str, entries: dict[str, Any], rule: str, head: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    if "--" in name:
        path = tmp_path / f"models--{name}" / "snapshots" / "1234"
    path = tiny.rewritten(head, path, entries)
    assert is_head(path)
    config, _, problems = list_head(path)
    assert (config.title, config.images, problems) == ("EAGLE-1 head", rule, [])  # pyright: ignore


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions_have_one_axis_in_files_old_and_new(name: str) -> None:
    rope = {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [1, 1, 2]}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = Eagle1Config.from_dict({**sizes, "rope_theta": 5e5, name: rope}).text_config
    assert (text.rope_theta, text.rope_scaling) == (5e5, RopeScaling())


@pytest.mark.parametrize(
    "entries", [MSD, MSD_QWEN, {"architectures": ["LlavaNextForConditionalGeneration"]}]
)
def test_a_plan_knows_it_by_its_config(entries: dict[str, Any], head: Path, tmp_path: Path) -> None:
    """A plan recognises an EAGLE-1 head by config.json alone, which is all that it fetches."""
    path = tiny.rewritten(head, tmp_path / "other", entries)
    (path / "model.safetensors").unlink()
    assert isinstance(read_draft_config(path), Eagle1Config)


def test_msds_layer_for_qwen_has_an_input_norm(head: Path, tmp_path: Path) -> None:
    weight = np.full(32, 0.5, np.float32)
    tensors = {"layers.0.input_layernorm.weight": weight}
    path = tiny.rewritten(head, tmp_path / "MSD-Qwen2VL-7B-Instruct", MSD_QWEN, tensors)
    config: Any = load_head(path)[0]
    text = config.text_config
    assert (text.input_norm, text.qkv_bias, config.images) == (True, True, "unfused")
    main(["export", str(path), str(tmp_path / "out")])
    again, params = load_head(tmp_path / "out")
    assert again.text_config == text
    np.testing.assert_array_equal(params["layers_0"]["input_layernorm"]["weight"], weight)


@pytest.mark.parametrize(
    ("entries", "tensors", "message"),
    [
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers 2; give 1"),
        ({}, {"layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, "has 2 layers; give"),
        ({}, {"fc.weight": np.zeros((32, 96), np.float32)}, r"fc.weight is \[32, 96\]"),
        (
            {},
            {"layers.0.post_attention_layernorm.weight": None},
            "layers.0.post_attention_layernorm.weight is missing",
        ),
        ({}, {"norm.weight": np.ones(32, np.float32)}, "norm.weight is unexpected"),
        ({"rope_is_neox_style": False}, {}, "has rope_is_neox_style false, which is not support"),
        ({"final_logit_softcapping": 30.0}, {}, "has final_logit_softcapping 30.0, which is not"),
        ({"jaxspec": {"images": "both"}}, {}, "images 'both' is not supported"),
        (
            {},
            {"model.fc.weight": np.zeros((32, 64), np.float32)},
            "EAGLE-1 head: fc.weight and model.fc.weight are the same parameter; remove one",
        ),
        ({"vocab_size": 35}, {}, r"embed_tokens.weight is \[36, 32\]"),
    ],
)
def test_what_does_not_fit_is_one_line(
    entries: dict[str, Any], tensors: dict[str, Any], message: str, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_head(tiny.rewritten(head, tmp_path / "other", entries, tensors))
    assert "\n" not in str(error.value)


def test_other_targets_and_options_are_refused(head: Path, tmp_path: Path) -> None:
    config = replace(load_head(head)[0], target_hash="")
    for change in ({"vocab_size": 200}, {"vocab_size": 35}, {"hidden_size": 64}):
        with pytest.raises(InputError, match="made for a target of width 32 and 36 tokens, and"):
            config.for_target(replace(TEXT, **change))
    with pytest.raises(InputError, match="made for a target of configuration"):
        load_head(head)[0].for_target(replace(TEXT, rope_theta=5e5))
    with pytest.raises(InputError, match="unknown image rule 'none'; give one of placeholder, "):
        config.with_images("none")
    for options in (["--for", "vllm"], ["--draft-vocabulary", "8"]):
        with pytest.raises(SystemExit):
            main(["export", str(head), str(tmp_path / "out"), *options])


def test_a_head_of_an_unreadable_kind_is_called_no_kv_head(head: Path, tmp_path: Path) -> None:
    path = tiny.rewritten(head, tmp_path / "other", {"num_hidden_layers": 2})
    facts = inspect(path)
    assert (facts.family, facts.model_type) == (None, None)
    assert facts.problems == ["EAGLE-1 head: num_hidden_layers 2; give 1"]
    with pytest.raises(InputError, match="a draft head, which takes no adapter; leave it out"):
        export(head, tmp_path / "out", adapter=tmp_path)
    with pytest.raises(InputError, match="EAGLE-1 heads take no text-only; leave it out"):
        export(head, tmp_path / "out", text_only=True)


def test_a_card_asks_with_an_image_if_the_target_reads_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card asks with an image if the target, given or in the hub's cache, reads images, or if the
    head has a rule for them.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--owner--llava"
    tiny.save(cached / "snapshots" / "1234", tiny.CONFIG, tiny.random_params(tiny.CONFIG))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1234")

    def asks_with_image(name: str, target: Target | None = None, **options: Any) -> bool:
        config = Eagle1Config.of_target(tiny.CONFIG, target_name=name, **options)
        save_head(tmp_path / "head", config, tiny.eagle_params(config, {}), None, overwrite=True)
        overwritten = SaveOptions(overwrite=True)
        export(tmp_path / "head", tmp_path / "out", target=target, options=overwritten)
        return "--image photo.jpg" in (tmp_path / "out" / "README.md").read_text()

    assert asks_with_image("owner/llava")
    assert asks_with_image("owner/other", Target("owner/other", tiny.CONFIG))
    assert asks_with_image("owner/other", images="zero")
    assert not asks_with_image("owner/other")
    assert not asks_with_image("llava")
