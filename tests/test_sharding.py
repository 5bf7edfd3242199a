"""Every parameter of every family has one row in the table of shardings, and its split divides."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import LlamaConfig, ModelConfig, text_config
from jaxspec.engine.memory import at_place, bytes_held
from jaxspec.engine.plan import read_by_pass
from jaxspec.errors import InputError
from jaxspec.models.families import FAMILIES, abstract_params, split_tower
from jaxspec.models.lvlms.vision import attend_pages
from jaxspec.sharding import (
    TABLE,
    Placement,
    abstract_mesh,
    constrain,
    logical_axes,
    make_mesh,
    mesh_of,
    on_mesh,
    replicated,
    shardings,
    spec,
)


def default(model_type: str, **flags: Any) -> ModelConfig:
    """Return what transformers takes for a config.json that says no more, but with two layers in
    the decoder.
    """
    # windows, which are Mistral's default, are not supported
    flags |= {"num_hidden_layers": 2, "sliding_window": None}
    raw = {"model_type": model_type, **flags, "text_config": flags}
    if model_type == "qwen2_5_vl":  # whose own defaults do not fit each other
        raw["vision_config"] = {"out_hidden_size": 8192, "depth": 2, "fullatt_block_indexes": [1]}
    if model_type == "qwen3_vl":
        raw["vision_config"] = {"out_hidden_size": 4096}
    if model_type == "gemma3":
        raw["vision_config"] = {"image_size": 896, "patch_size": 14}
    return FAMILIES[model_type].config.from_hf(raw)


def rows_of(path: str) -> list[str]:
    return [pattern for pattern, _ in TABLE if re.fullmatch(pattern, path)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_parameter_matches_one_row(model_type):
    """Every parameter matches one row, in a family's default model and in one with every bias that
    it knows.
    """
    for biased in (False, True):
        flags = {"attention_bias": biased, "mlp_bias": biased, "multimodal_projector_bias": biased}
        flags |= {"enable_bias": biased, "word_embed_proj_dim": 512 if biased else None}
        for path, leaf in flatten_dict(
            abstract_params(default(model_type, **flags)), sep="/"
        ).items():
            # A bias without a row has its matrix's.
            matching = rows_of(path) or rows_of(re.sub(r"/bias$", "/weight", path))
            assert len(matching) == 1, (path, matching)
            axes = logical_axes(path)
            assert len(axes) in (0, len(leaf.shape)), (path, axes, leaf.shape)


@cache
def shapes(model_type: str) -> tuple[ModelConfig, Any]:
    config = default(model_type)
    return config, abstract_params(config, jnp.bfloat16)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_that_reads_images_has_parameters_of_a_tower(model_type):
    tower, rest = split_tower(shapes(model_type)[1])
    assert bool(tower) == (FAMILIES[model_type].images is not None)
    assert rest


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_plan_counts_no_tower_in_a_pass(model_type):
    config, params = shapes(model_type)
    rows = "embed_tokens_per_layer" if text_config(config).tie_word_embeddings else "embed_tokens"
    decoder = re.compile(rf"(language_model/)?(model|lm_head)/(?!{rows})")
    leaves = flatten_dict(params, sep="/").items()
    expected = [leaf for path, leaf in leaves if decoder.match(path)]
    assert bytes_held(read_by_pass(params)) == bytes_held(expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_splits_divide_or_fall_back(model_type):
    config, params = shapes(model_type)
    text = text_config(config)
    whole = sum(leaf.size * 2 for leaf in jax.tree.leaves(params))
    for model in (2, 3, 8):
        places = shardings(config, params, abstract_mesh(model=model, fsdp=2))
        jax.tree.map(
            lambda leaf, place: place.shard_shape(leaf.shape), params, places
        )  # raises where one does not divide
        held = bytes_held(at_place(params, places))
        assert whole / (2 * model) <= held < whole
        # nearly all of a model divides
        if text.num_key_value_heads % model == 0 and text.vocab_size % model == 0:
            assert held < 1.2 * whole / (2 * model)


def test_heads_are_split_whole():
    """Heads are split whole: of two kv heads over four devices the rows would divide, the heads do
    not.
    """
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    layer = "model/layers_0/self_attn"
    assert spec(config, f"{layer}/q_proj/weight", (64, 64), abstract_mesh(model=4)) == P(
        "model", None
    )
    assert spec(config, f"{layer}/k_proj/weight", (32, 64), abstract_mesh(model=4)) == P(None, None)
    assert spec(config, f"{layer}/k_proj/weight", (32, 64), abstract_mesh(model=2)) == P(
        "model", None
    )
    assert spec(config, f"{layer}/o_proj/weight", (64, 64), abstract_mesh(model=4, fsdp=2)) == P(
        "fsdp", "model"
    )


def test_an_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="0 rows match 'model/layers_0/gate'"):
        logical_axes("model/layers_0/gate")


def test_constrain():
    x = jnp.zeros((8, 4))
    assert constrain(x, "batch", "heads") is x
    mesh = make_mesh(model=2, data=2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: constrain(x, "batch", "heads"))(x)
        odd = jax.jit(lambda x: constrain(x[:7, :3], "batch", "heads"))(x)
    assert {shard.data.shape for shard in split.addressable_shards} == {(4, 2)}
    assert {shard.data.shape for shard in odd.addressable_shards} == {(7, 3)}


def test_mesh():
    mesh = make_mesh(model=4)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "model": 4}
    assert mesh_of({"a": jax.device_put(np.zeros(4), replicated(mesh))}) == mesh
    assert mesh_of({"a": jnp.zeros(4)}) is None
    many = math.prod(make_mesh().shape.values()) + len(jax.devices())
    for wrong, message in ((0, "model: 0; give"), (many, f"{many} model devices, of")):
        with pytest.raises(InputError, match=message):
            make_mesh(model=wrong)
    for name in ("data_parallel", "model_parallel"):
        with pytest.raises(InputError, match=f"{name}: 0; give"):
            Placement(**{name: 0}).mesh(4)


def test_many_pages_stay_where_they_are():
    """Many pages stay where they are: a tower reads its pages in blocks, and over a mesh each
    device reads its own.
    """
    mesh = make_mesh(data=4, fsdp=2)
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(8 * 20, 3, 4)), jnp.float32)
        for i in range(3)
    )
    attend = jax.jit(partial(attend_pages, 2))
    expected = attend(q, k, v)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    with on_mesh(mesh):
        compiled = attend.lower(*(jax.device_put(x, rows) for x in (q, k, v))).compile()
    text = compiled.as_text()
    assert "while" in text
    assert "all-gather" not in text
    np.testing.assert_allclose(
        compiled(*(jax.device_put(x, rows) for x in (q, k, v))), expected, rtol=1e-6
    )
