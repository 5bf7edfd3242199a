"""LoRA adapters in PEFT's format are merged as numpy merges them, and wrong ones are refused in one
line.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.adapters import read_adapter, read_pairs, save_adapter
from jaxspec.config import text_config
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.models.int8 import int8_params
from jaxspec.models.lora import LORA, Lora, init_lora, merged
from jaxspec.sharding import make_mesh
from tests import tiny

RANK, ALPHA = 3, 5.0
NAMES = {
    "v4": "language_model.model.layers.{}.",
    "v5": "model.language_model.layers.{}.",
    "text": "model.layers.{}.",
}
ENTRIES: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, params = tmp_path_factory.mktemp("models"), tiny.random_params(tiny.CONFIG)
    tiny.save(path / "llava", tiny.CONFIG, params)
    huggingface.save(
        path / "text", tiny.CONFIG.text_config, params["language_model"], tokenizer=tiny.tokenizer()
    )
    return path


def write(
    path: Path, names: str = "v5", entries: dict[str, Any] | None = None, **ranks: int
) -> dict[str, np.ndarray]:
    """Write an adapter of q_proj in both layers and of layer 1's down_proj; return its tensors."""
    rng, tensors = np.random.default_rng(1), {}
    sizes = {
        "0.self_attn.q_proj": (32, 32),
        "1.self_attn.q_proj": (32, 32),
        "1.mlp.down_proj": (32, 48),
    }
    for module, (rows, columns) in sizes.items():
        layer, name = module.split(".", 1)
        place, rank = (
            f"base_model.model.{NAMES[names].format(layer)}{name}",
            ranks.get(name.rpartition(".")[2], RANK),
        )
        tensors[f"{place}.lora_A.weight"] = rng.normal(size=(rank, columns)).astype(np.float32)
        tensors[f"{place}.lora_B.weight"] = rng.normal(size=(rows, rank)).astype(np.float32)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(ENTRIES | (entries or {})))
    return tensors


def by_numpy(
    base: Path, out: Path, tensors: dict[str, np.ndarray], scale: Callable[[str], float]
) -> Path:
    """Return a copy of the model whose file holds the sums."""
    shutil.copytree(base, out)
    stored = load_file(out / "model.safetensors")
    for name, a in tensors.items():
        if "lora_A" in name:
            layer = name.partition("layers.")[2].removesuffix(".lora_A.weight")
            (own,) = (
                key
                for key in stored
                if key.endswith(f"layers.{layer}.weight") and "vision" not in key
            )
            stored[own] = stored[own] + np.float32(scale(name)) * (
                tensors[name.replace("lora_A", "lora_B")] @ a
            )
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    return out


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), ours, theirs
    )


def test_an_adapter_of_old_is_read(models: Path, tmp_path: Path) -> None:
    """An adapter in a .bin file, as PEFT wrote before 0.6, gives the same parameters as
    safetensors.
    """
    torch = pytest.importorskip("torch")
    write(tmp_path / "adapter")
    new = LoadedModel.load(models / "llava", adapter=tmp_path / "adapter").params
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    torch.save(
        {name: torch.tensor(tensor) for name, tensor in tensors.items()},
        tmp_path / "adapter/adapter_model.bin",
    )
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    old = LoadedModel.load(models / "llava", adapter=tmp_path / "adapter").params
    jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.parametrize("names", NAMES)
def test_an_adapter_is_merged(models: Path, tmp_path: Path, names: str) -> None:
    base = models / ("text" if names == "text" else "llava")
    tensors = write(tmp_path / "adapter", names)
    expected = LoadedModel.load(
        by_numpy(base, tmp_path / "merged", tensors, lambda _: ALPHA / RANK)
    ).params
    found = LoadedModel.load(base, adapter=tmp_path / "adapter").params
    assert_same(found, expected)
    plain: Any = flatten_dict(LoadedModel.load(base).params, sep="/")
    now: Any = flatten_dict(found, sep="/")
    changed = {path for path in plain if not np.array_equal(plain[path], now[path])}
    assert sorted(path.split("/")[-3:-1] for path in changed) == sorted(
        [["self_attn", "q_proj"], ["self_attn", "q_proj"], ["mlp", "down_proj"]]
    )


@pytest.mark.parametrize(
    ("entries", "ranks", "scale"),
    [
        ({"use_rslora": True}, {}, lambda name: ALPHA / RANK**0.5),
        (
            {"alpha_pattern": {"q_proj": 9}},
            {},
            lambda name: (9 if "q_proj" in name else ALPHA) / RANK,
        ),
        (
            {"rank_pattern": {"down_proj": 2}},
            {"down_proj": 2},
            lambda name: ALPHA / (2 if "down" in name else RANK),
        ),
        (
            {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 1}},
            {},
            lambda name: (1 if "layers.1.self" in name else ALPHA) / RANK,
        ),
    ],
)
def test_scales(
    models: Path, tmp_path: Path, entries: dict[str, Any], ranks: dict[str, int], scale: Any
) -> None:
    tensors = write(tmp_path / "adapter", "v5", entries, **ranks)
    expected = LoadedModel.load(
        by_numpy(models / "llava", tmp_path / "merged", tensors, scale)
    ).params
    assert_same(LoadedModel.load(models / "llava", adapter=tmp_path / "adapter").params, expected)


def test_parts_that_are_saved_whole_replace_the_models(models: Path, tmp_path: Path) -> None:
    tensors = write(tmp_path / "adapter")
    own = np.full((32, 16), 0.25, np.float32)
    tensors["base_model.model.model.multi_modal_projector.linear_1.weight"] = own
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    found = LoadedModel.load(models / "llava", adapter=tmp_path / "adapter").params
    np.testing.assert_array_equal(found["multi_modal_projector"]["linear_1"]["weight"], own)


EMBEDDING = (
    np.random.default_rng(2)
    .normal(size=(tiny.CONFIG.text_config.vocab_size, 32))
    .astype(np.float32)
)
NAMES_OF_TIED = {
    "text": ("model.embed_tokens.weight", "lm_head.weight"),
    "llava": ("model.language_model.embed_tokens.weight", "lm_head.weight"),
}


@pytest.mark.parametrize(
    ("kind", "entries", "saved", "parted"),
    [
        ("text", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": False}, (0,), True),
        ("llava", {"modules_to_save": ["embed_tokens"]}, (0,), True),
        ("text", {"modules_to_save": ["lm_head"]}, (1,), True),
        ("text", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, (0,), False),
        ("text", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, (0, 1), False),
        ("text", {"modules_to_save": ["embed_tokens", "lm_head"]}, (0, 1), False),  # equal ones
        ("text", {}, (0, 1), False),  # PEFT saves embeddings that were resized
        ("text", {}, (0,), False),
        ("text", {"target_modules": ["lm_head"]}, (), True),
    ],
)
def test_an_adapter_parts_tied_matrices_as_peft_does(
    tmp_path: Path,
    kind: str,
    entries: dict[str, Any],
    saved: tuple[int, ...],
    parted: bool,
    said: Callable[..., str],
) -> None:
    text = replace(tiny.CONFIG.text_config, tie_word_embeddings=True)
    config: Any = (
        text if kind == "text" else replace(tiny.CONFIG, text_config=text, tie_word_embeddings=True)
    )
    tiny.save(tmp_path / "base", config, tiny.random_params(config))
    plain: Any = text_params(config, LoadedModel.load(tmp_path / "base").params)
    tensors = write(tmp_path / "adapter", "v5" if kind == "llava" else "text", entries)
    own = {f"base_model.model.{NAMES_OF_TIED[kind][i]}": EMBEDDING for i in saved}
    if not saved:
        a, b = np.ones((RANK, 32), np.float32), np.ones((len(EMBEDDING), RANK), np.float32)
        own = {
            f"base_model.model.lm_head.lora_{half}.weight": factor
            for half, factor in (("A", a), ("B", b))
        }
    save_file(tensors | own, tmp_path / "adapter" / "adapter_model.safetensors")
    said("export", tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "adapter")
    merged = LoadedModel.load(tmp_path / "out")
    assert text_config(merged.config).tie_word_embeddings == (not parted)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {raw["tie_word_embeddings"], raw.get("text_config", raw)["tie_word_embeddings"]} == {
        not parted
    }
    found: Any = text_params(merged.config, merged.params)
    before = np.asarray(plain["model"]["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(
        found["model"]["embed_tokens"]["embedding"], EMBEDDING if 0 in saved else before
    )
    if parted:
        # of rank 3: 3 alpha / 3
        output = EMBEDDING if 1 in saved else before if saved else before + ALPHA
        np.testing.assert_allclose(found["lm_head"]["weight"], output, rtol=1e-6)


@pytest.mark.parametrize("ending", ["", ".default"], ids=["saved", "state_dict"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("targets", "tying"),
    [
        (("embed_tokens",), False),
        (("lm_head",), False),
        (("embed_tokens", "lm_head"), False),
        (("embed_tokens", "lm_head"), True),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else f"tying={value}",
)
def test_embedding_and_output_matrix_are_updated(
    tmp_path: Path, targets: tuple[str, ...], tying: bool, tied: bool, ending: str
) -> None:
    """Updates of embedding and output matrix are read as PEFT writes them: with the matrix itself,
    as `base_layer`, next to its two factors.
    """
    config = replace(tiny.CONFIG.text_config, tie_word_embeddings=tied)
    params, rng = tiny.random_params(config), np.random.default_rng(3)
    huggingface.save(tmp_path / "base", config, params)
    stored = load_file(tmp_path / "base" / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    matrices = {"embed_tokens": embedding, "lm_head": stored.get("lm_head.weight", embedding)}
    size, width = embedding.shape
    tensors, factors = write(tmp_path / "adapter", "text", {"ensure_weight_tying": tying}), None
    for target in targets:
        module = f"base_model.model.{'model.' if target == 'embed_tokens' else ''}{target}"
        a, b = rng.normal(size=(RANK, size)), rng.normal(size=(width, RANK))
        a, b = factors = factors if factors and tying and tied else (a.astype("f4"), b.astype("f4"))
        tensors[f"{module}.base_layer.weight"] = matrices[target]
        if target == "embed_tokens":
            tensors |= {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
        else:
            tensors |= {
                f"{module}.lora_A.weight": b.T.copy(),
                f"{module}.lora_B.weight": a.T.copy(),
            }
        matrices[target] = matrices[target] + np.float32(ALPHA / RANK) * (a.T @ b.T)
    tensors = {
        re.sub(r"(lora_[AB])(?=\.weight)|(lora_embedding_[AB])$", rf"\g<0>{ending}", name): tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    model = huggingface.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert text_config(model.config).tie_word_embeddings == (tied and tying)
    params: Any = model.params
    ours = {"embed_tokens": params["model"]["embed_tokens"]["embedding"]}
    if "lm_head" in params:
        ours["lm_head"] = params["lm_head"]["weight"]
    for target, matrix in ours.items():
        np.testing.assert_allclose(matrix, matrices[target], rtol=1e-6, atol=1e-6)


def test_modules_of_peft_in_memory_are_known_by_their_names(models: Path, tmp_path: Path) -> None:
    """The state that `torch.save(model.state_dict())` keeps is read: the wrapper of
    `modules_to_save`, and both its parts.
    """
    tensors = write(tmp_path / "adapter", "text", {"modules_to_save": ["embed_tokens"]})
    module = "base_model.model.model.embed_tokens"
    tensors[f"{module}.modules_to_save.default.weight"] = EMBEDDING
    tensors[f"{module}.original_module.weight"] = 0 * EMBEDDING
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    params: Any = huggingface.load(models / "text", adapter=tmp_path / "adapter").params
    np.testing.assert_array_equal(params["model"]["embed_tokens"]["embedding"], EMBEDDING)


@pytest.mark.full
def test_on_a_mesh_in_16_bits_and_in_int8(models: Path, tmp_path: Path) -> None:
    write(tmp_path / "adapter")
    whole = LoadedModel.load(models / "llava", adapter=tmp_path / "adapter").params
    split = LoadedModel.load(
        models / "llava", adapter=tmp_path / "adapter", mesh=make_mesh(model=2)
    ).params
    assert_same(split, whole)
    matrix = split["language_model"]["model"]["layers_1"]["mlp"]["down_proj"]["weight"]
    assert matrix.addressable_shards[0].data.shape == (32, 24)
    half = LoadedModel.load(
        models / "llava", jnp.dtype("bfloat16"), adapter=tmp_path / "adapter"
    ).params
    assert_same(half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole), 0)
    small = LoadedModel.load(models / "llava", weights="int8", adapter=tmp_path / "adapter").params
    assert_same(small, int8_params(whole), 0)


@pytest.mark.full
def test_the_commands_merge(models: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    tensors = write(tmp_path / "adapter")
    base, expected = (
        models / "llava",
        by_numpy(models / "llava", tmp_path / "merged", tensors, lambda _: ALPHA / RANK),
    )
    adapted = (base, "--adapter", tmp_path / "adapter")
    said("export", base, tmp_path / "out", *adapted[1:])
    assert_same(LoadedModel.load(tmp_path / "out").params, LoadedModel.load(expected).params)
    asked = ("--prompt", "What?", "--max-new-tokens", 8, "--json")
    answers = [
        json.loads(said("generate", "--target", *target, *asked))["tokens"]
        for target in (adapted, (tmp_path / "out",), (base,))
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_trained_adapter_is_read_back(models: Path, tmp_path: Path) -> None:
    base, lora = (
        LoadedModel.load(models / "llava"),
        Lora(rank=2, alpha=6, modules=("q_proj", "o_proj")),
    )
    pairs = jax.tree.map(lambda leaf: leaf + 0.1, init_lora(lora, base.params, jax.random.key(0)))
    params = {**base.params, LORA: pairs}
    save_adapter(tmp_path / "adapter", base.config, params, lora, "llava", jnp.float32)
    found = LoadedModel.load(models / "llava", adapter=tmp_path / "adapter")
    assert_same(found.params, merged(params, lora))
    assert_same(read_pairs(read_adapter(tmp_path / "adapter", base.config), lora), pairs, 0)


Change = Callable[[Path, dict[str, np.ndarray]], Any]
A = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


def entry(**changes: Any) -> Change:
    return lambda path, _: (path / "adapter_config.json").write_text(json.dumps(ENTRIES | changes))


def tensor(name: str, values: np.ndarray | None) -> Change:
    def change(path: Path, tensors: dict[str, np.ndarray]) -> None:
        kept = {key: value for key, value in tensors.items() if key != name}
        save_file(
            kept if values is None else kept | {name: values}, path / "adapter_model.safetensors"
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path, _: (path / "adapter_model.safetensors").unlink(),
            r"no adapter_model\.safetensors; give",
        ),
        (entry(peft_type="LOHA"), r"peft_type 'LOHA'; only LORA"),
        (entry(use_dora=True), r"use_dora True is not supported; merge it with PEFT"),
        (entry(alora_invocation_tokens=[5]), r"alora_invocation_tokens \[5\] is not known; merge"),
        (entry(quantum={"flux": 1}, kasa_config=None), r"quantum \{'flux': 1\} is not known; merg"),
        (entry(lora_alpha=float("nan")), r"no rank and alpha of .* \(lora_alpha nan\); write it"),
        (entry(lora_alpha=1e40), r"no rank and alpha of .* \(lora_alpha 1e\+40\); write it anew"),
        (
            entry(r=4),
            r"lora_A\.weight is \[3, 32\], but adapter_config\.json and the model ask for "
            r"\[4, 32\]",
        ),
        (tensor(A, np.ones((3, 16), np.float32)), r"is \[3, 16\], but .* ask for \[3, 32\]"),
        (tensor(A, None), r"lora_B\.weight lacks"),
        (
            tensor(
                "base_model.model.model.language_model.layers.7.mlp.up_proj.lora_A.weight",
                np.ones((3, 32), "f4"),
            ),
            r"the model has no matrix language_model\.model\.layers\.7\.mlp\.up_proj\.weight",
        ),
        (
            tensor("base_model.model.score.weight", np.ones((2, 32), np.float32)),
            r"the model has no tensor score",
        ),
    ],
)
def test_wrong_adapters_are_refused_in_one_line(
    models: Path, tmp_path: Path, change: Change, message: str
) -> None:
    change(tmp_path / "adapter", write(tmp_path / "adapter"))
    with pytest.raises(InputError, match=message) as caught:
        LoadedModel.load(models / "llava", adapter=tmp_path / "adapter")
    assert "\n" not in str(caught.value)


def test_modules_to_save_are_a_list(tmp_path: Path) -> None:
    text = replace(tiny.CONFIG.text_config, tie_word_embeddings=True)
    tiny.save(tmp_path / "base", text, tiny.random_params(text))
    tensors = write(tmp_path / "adapter", "text", {"modules_to_save": 5})
    own = {f"base_model.model.{NAMES_OF_TIED['text'][0]}": EMBEDDING}
    save_file(tensors | own, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"adapter_config.json: modules_to_save 5 is no list \("):
        LoadedModel.load(tmp_path / "base", adapter=tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    write(tmp_path / "adapter", "v5")
    with pytest.raises(
        InputError, match=r"the model has no matrix model\.language_model\.layers\.0"
    ):
        LoadedModel.load(models / "text", adapter=tmp_path / "adapter")
