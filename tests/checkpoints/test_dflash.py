"""DFlash and DSpark heads are read from the public layouts, and written to them, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from jaxspec import EngineConfig
from jaxspec.cli.inspect import inspect
from jaxspec.config import Qwen2Config, RopeScaling
from jaxspec.engine.memory import bytes_held
from jaxspec.engine.plan import abstract_program
from jaxspec.errors import InputError
from jaxspec.heads.blocks import TargetPass, corrected, embedder, joined, pick, read_blocks
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.heads.loading import is_head, load_head, read_draft_config, save_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.publishing.export import Target, export
from jaxspec.typing import Params
from tests import tiny
from tests.tiny.dflash_reference import draft as reference

J, LENGTH, ANCHOR = 3, 12, 7
TEXT = Qwen2Config(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=1e6,
    rope_scaling=RopeScaling(mrope_section=(1, 1, 2)),
    tie_word_embeddings=True,
)
TARGET = tiny.random_params(TEXT)
WORDS = (9, 3, 30, 4, 17, 39, 5, 22)
"""In no order: files have them in order of their ids."""
DSPARK: dict[str, Any] = {"markov": 4, "anchored": True}
MIXED = ("full_attention", "sliding_attention")


def made(
    words: tuple[int, ...] = (), kinds: tuple[str, ...] = (), **options: Any
) -> tuple[DFlashConfig, Params]:
    config = DFlashConfig.of_target(TEXT, 2, (2, 4), target_name="owner/target", gamma=J, **options)
    text = replace(config.text_config, draft_vocabulary=words, layer_types=kinds)
    config = replace(config, text_config=text)
    output = {"lm_head": {"weight": TARGET["model"]["embed_tokens"]["embedding"]}}
    return config, tiny.eagle_params(config, TARGET | output)


def row() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 40, LENGTH)
    return tokens, rng.normal(size=(LENGTH, 2 * TEXT.hidden_size)).astype(np.float32)


def scores(
    config: DFlashConfig, params: Params, text: Any = TEXT, target: Params = TARGET
) -> np.ndarray:
    """Return our scores [J, V] of the block at the anchor, in the forced tokens of the row."""
    config = config.for_target(text)
    tokens, states = (jnp.asarray(leaf)[None] for leaf in row())
    rows, block = PromptRows(tokens, jnp.asarray([LENGTH])), ANCHOR + jnp.arange(J)[None, None]
    reading = TargetPass(jnp.zeros((1, LENGTH, 32)), states=states)
    hidden = read_blocks(config, params, target, reading, rows, block, None)
    drafts = LanguageModel(config.text_config)
    scored = drafts.scores(joined(params, target, config.text_config.draft_vocabulary), hidden[0])
    before = pick(tokens, block)[0]
    ours = corrected(config, params, scored, before, embedder(config, params, target))
    whole = np.full((J, TEXT.vocab_size), -np.inf)
    whole[:, list(config.text_config.draft_vocabulary or range(TEXT.vocab_size))] = ours[0]
    return whole


@pytest.mark.parametrize(
    ("engine", "words", "options", "command"),
    [
        ("vllm", WORDS, {}, '"method": "dflash", "model": "{}", "num_speculative_tokens": 3'),
        ("vllm", WORDS, DSPARK | {"window": 5, "causal": False}, '"method": "dspark"'),
        ("vllm", (), {"anchored": True, "own_output": True}, '"method": "dspark"'),
        (
            *("sglang", (), {"window": 5, "kinds": MIXED}),
            "--speculative-algorithm DFLASH --speculative-draft-model-path {}",
        ),
        ("speculators", (), {"own_embedding": True, "own_output": True}, "vllm serve {}"),
        ("speculators", WORDS, DSPARK | {"window": 5, "kinds": MIXED}, "vllm serve {}"),
        ("speculators", (), {"window": 5, "causal": False}, "vllm serve {}"),
    ],
)
def test_exports_are_read_bit_for_bit_and_score_alike(
    engine: str,
    words: tuple[int, ...],
    options: Any,
    command: str,
    tmp_path: Path,
    said: Callable[..., str],
) -> None:
    config, params = made(words, **options)
    save_head(tmp_path / "head", config, params, None)
    told = said("export", tmp_path / "head", tmp_path / "out", "--for", engine)
    assert command.format(tmp_path / "out") in told
    config, params = load_head(tmp_path / "out")
    first, again = load_head(tmp_path / "head")
    # speculators' layout has no place for the target's hash, but for an entry of our own
    assert config == replace(first, scaled=engine != "speculators")
    assert config.target_layers == (2, 4)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert "DFlash head for 'owner/target'" in said("inspect", tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    embedding = np.asarray(TARGET["model"]["embed_tokens"]["embedding"], np.float64)
    tokens, states = row()
    block = tokens[ANCHOR], J, tokens[ANCHOR + 1 : ANCHOR + J]
    theirs = reference(raw, tensors, embedding, embedding, states[:ANCHOR], *block)
    np.testing.assert_allclose(scores(config, params), theirs, atol=1e-4)


PARTS: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 32768,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "vocab_size": 40,
}
GOLDEN: dict[str, dict[str, Any]] = {
    "vllm": PARTS
    | {
        **{"architectures": ["DFlashDraftModel"], "block_size": 4},
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3]},
        **{"draft_vocab_size": 40, "num_target_layers": 7, "sample_from_anchor": False},
        **{"tie_word_embeddings": False, "torch_dtype": "float32"},
    },
    "speculators": {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 4,
        "draft_vocab_size": 40,
        "mask_token_id": 39,
        "num_target_layers": 7,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3}
                | {"accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": "owner/target", "architectures": []},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformer_layer_config": PARTS | {"tie_word_embeddings": False},
    },
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "head"
    save_head(path, *made(), None)
    return path


@pytest.mark.parametrize("engine", GOLDEN)
def test_configurations_are_what_engines_read(head: Path, tmp_path: Path, engine: Any) -> None:
    export(head, tmp_path / "out", engine=engine)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw.pop("jaxspec").keys() == {"target_hash", "target_name"}
    assert raw == GOLDEN[engine]


def unnamed(raw: dict[str, Any]) -> None:
    """Remove the names of classes, as in files that name none."""
    del raw["architectures"], raw["jaxspec"]


def newer(raw: dict[str, Any]) -> None:
    """Nest the block's size and add M-RoPE's sections, as z-lab's files do since Qwen3.5."""
    raw["dflash_config"]["block_size"] = raw.pop("block_size")
    raw["rope_parameters"]["mrope_section"] = [1, 1, 2]
    del raw["jaxspec"], raw["sample_from_anchor"], raw["draft_vocab_size"]


def usual(raw: dict[str, Any]) -> None:
    """Leave out the layers that the head reads, which are then the usual 1 and 4 of 7."""
    del raw["dflash_config"]["target_layer_ids"], raw["jaxspec"], raw["layer_types"]


@pytest.mark.parametrize(
    ("change", "layers"), [(newer, (2, 4)), (usual, (2, 5)), (unnamed, (2, 4))]
)
def test_heads_are_read_as_publishers_write_them(
    head: Path, tmp_path: Path, change: Any, layers: tuple[int, ...]
) -> None:
    stored = load_file(head / "model.safetensors")
    prefixed: dict[str, Any] = {f"model.{name}": leaf for name, leaf in stored.items()}
    path = tiny.rewritten(head, tmp_path / "head", change, prefixed | dict.fromkeys(stored))
    assert is_head(path)
    assert isinstance(read_draft_config(path), DFlashConfig)
    config, params = load_head(path)
    first, own = load_head(head)
    assert config == replace(first, target_layers=layers, target_hash="", target_name="")
    jax.tree.map(np.testing.assert_array_equal, params, own)
    assert config.for_target(TEXT).text_config.tie_word_embeddings


@pytest.mark.parametrize("markov", [4, 0], ids=["DSpark", "DFlash"])
def test_deepseeks_files_are_read(markov: int, tmp_path: Path) -> None:
    """DeepSeek's files are read: they leave `sample_from_anchor` out, have a confidence head, which
    is kept, and call a head without a Markov head DSpark's too.
    """
    own = {"own_embedding": True, "own_output": True, "anchored": True, "confidence": 32 + markov}
    config, params = made(markov=markov, **own)
    save_head(tmp_path / "own", config, params, None)

    def change(raw: dict[str, Any]) -> None:
        assert raw["architectures"] == ["Qwen3DSparkModel"]
        assert raw["markov_rank"] == markov
        assert raw["enable_confidence_head"]
        assert raw["confidence_head_with_markov"] == (markov > 0)
        del raw["sample_from_anchor"], raw["jaxspec"], raw["draft_vocab_size"]

    path = tiny.rewritten(tmp_path / "own", tmp_path / "head", change)
    shapes = {name: leaf.shape for name, leaf in load_file(path / "model.safetensors").items()}
    assert shapes["confidence_head.proj.weight"] == (1, 32 + markov)
    assert shapes["confidence_head.proj.bias"] == (1,)
    read, leaves = load_head(path)
    assert read == replace(config, target_hash="", target_name="").for_target(TEXT)
    jax.tree.map(np.testing.assert_array_equal, leaves, params)


@pytest.mark.parametrize(
    ("kind", "version", "anchored"),
    [
        *(("dspark", version, False) for version in ("0.6.0.1", "0.7.0.dev31", "0.7.0a2")),
        *(("dspark", version, True) for version in ("0.7.0", "0.7.0.1", "0.10.0.dev3", None)),
        ("dflash", "0.9.0", False),
    ],
)
def test_speculators_files_without_the_key_are_read_by_their_version(
    kind: str, version: str | None, anchored: bool, tmp_path: Path
) -> None:
    """speculators' files without `sample_from_anchor` are read by their version: DSpark's slots
    moved in 0.7.0, which writes the key, and later readers default to true.
    """
    save_head(tmp_path / "own", *made(**DSPARK), None, server="speculators")

    def change(raw: dict[str, Any]) -> None:
        raw |= {"speculators_model_type": kind, "speculators_version": version}
        raw["architectures"] = [f"{'DSpark' if kind == 'dspark' else 'DFlash'}DraftModel"]
        del raw["sample_from_anchor"]

    config: Any = load_head(tiny.rewritten(tmp_path / "own", tmp_path / "head", change))[0]
    assert (config.anchored, config.gamma) == (anchored, J - (not anchored))
    slots = f"the {'newest token' if anchored else 'first mask'}'s slot scores the first"
    assert inspect(tmp_path / "head").facts["drafts"] == f"{config.gamma} tokens per pass; {slots}"


def test_a_window_as_long_as_the_context_changes_no_score() -> None:
    config, params = made()
    windowed = replace(config.text_config, sliding_window=ANCHOR + 1)
    whole = scores(config, params)
    for causal, same in ((False, True), (True, False)):
        ours = scores(replace(config, text_config=windowed, causal=causal), params)
        assert np.array_equal(ours, whole) == same
    shorter = replace(config.text_config, sliding_window=ANCHOR)
    ours = scores(replace(config, text_config=shorter, causal=False), params)
    assert not np.array_equal(ours, whole)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("server", "changes", "window", "causal"),
    [
        ("vllm", SLIDING | {"sliding_window": 512}, 512, True),
        ("vllm", SLIDING | {"sliding_window": 32768}, 32768, True),
        ("vllm", SLIDING | {"sliding_window": 512, "causal": False}, 512, False),
        ("vllm", SLIDING | {"sliding_window": 512, "is_causal": False}, 512, False),
        ("vllm", SLIDING | {"sliding_window": 512, "use_sliding_window": False}, None, True),
        ("vllm", {"sliding_window": 512, "use_sliding_window": True}, None, True),
        ("vllm", {"sliding_window": 512, "layer_types": None, "max_window_layers": 2}, None, True),
        ("speculators", SLIDING | {"sliding_window": 512}, 513, True),
        ("speculators", SLIDING | {"sliding_window": 32768}, 32769, True),
        ("speculators", SLIDING | {"sliding_window": 9, "use_sliding_window": None}, 10, True),
        ("speculators", SLIDING | {"sliding_window": 9, "sliding_window_non_causal": True},
         10, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_windows_are_read(
    server: Any,
    changes: dict[str, Any],
    window: int | None,
    causal: bool,
    nested: bool,
    tmp_path: Path,
) -> None:
    """Sliding layers are causal in a block where nothing says otherwise, however long the window.

    The entries are at the top level, or in their layout's nested part. speculators' window does not
    count the newest token.
    """
    save_head(tmp_path / "own", *made(), None, server=server)
    part = "transformer_layer_config" if server == "speculators" else "dflash_config"

    def change(raw: dict[str, Any]) -> None:
        if nested:
            raw |= {name: changes[name] for name in changes if "causal" in name}
            raw.pop("layer_types", None)
        (raw[part] if nested else raw).update(changes)

    config: Any = load_head(tiny.rewritten(tmp_path / "own", tmp_path / "head", change))[0]
    text = replace(config.text_config, sliding_window=None, layer_types=())
    own: Any = load_head(tmp_path / "own")[0]
    assert replace(config, text_config=text, causal=True) == own
    assert config.causal == causal
    kinds = tuple(SLIDING["layer_types"]) if window else ()
    assert (config.text_config.sliding_window, config.text_config.layer_types) == (window, kinds)


def inner(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["dflash_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash2 head; give one of KV, "),
        ({"rope_is_neox_style": False}, "has rope_is_neox_style false, which is not supp"),
        (inner(is_neox_style=False), "has is_neox_style false, which is not supported"),
        (lambda raw: raw.pop("block_size"), "config.json lacks block_size; add the slots of"),
        (
            lambda raw: raw["dflash_config"].pop("mask_token_id"),
            "config.json lacks mask_token_id; add the token whose embedding stands for those to",
        ),
        ({"is_causal": True}, "is_causal true in full layers is not supported"),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [*MIXED, "x"]},
            "layer_types .* for 2 layers",
        ),
        (inner(output_multiplier=0.2), "has output_multiplier 0.2, which is not supported"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, 'has markov_head_type "rnn", which'),
        ({"fc_norm": True, "query_zero_predicts_next": True}, "has fc_norm true, query_zero"),
        (inner(target_layer_ids=[3, 1]), r"reads target layers \[4, 2\]; give them in order"),
        (inner(target_layer_ids="all"), "not readable .*; fetch it again"),
        (inner(mask_token_id=40), "mask token 40 of 40 tokens"),
        ({"block_size": 1}, "gamma: 0; give a whole number, 1 or more"),
        ({"block_size": "16"}, "not readable .*; fetch it again"),
        ({"draft_vocab_size": -5}, "draft_vocab_size -5; give 1 or more"),
        ({"draft_vocab_size": 8}, "DFlash head: the files lack d2t, the draft vocabulary"),
        ({"d2t": np.full(8, 33)}, "names token 40 of 40; fetch the head again"),
        ({"model.fc.weight": np.zeros((2, 2))}, "fc.weight and model.fc.weight are the"),
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"layers.1.mlp.up_proj.weight": None}, "layers.1.mlp.up_proj.weight is miss"),
        ({"fc.weight": np.zeros((32, 96), np.float32)}, r"fc.weight.*\[32, 96\]"),
        ({"layers.0.self_attn.q_proj.bias": np.zeros(32)}, "q_proj.bias is unexpect"),
        (
            {"confidence_head.proj.weight": np.zeros(())},
            "the tensors do not fit a DFlash head (.*); f",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_what_this_library_lacks_is_named(
    head: Path, tmp_path: Path, change: Any, line: str
) -> None:
    """A change of config.json or of tensors that this library cannot read is named in one line."""
    of_tensors = isinstance(change, dict) and any("." in n or n == "d2t" for n in change)
    changes = ({}, change) if of_tensors else (change, {})
    path = tiny.rewritten(head, tmp_path / "head", *changes)
    assert is_head(path)
    assert re.search(line, tiny.one_line(load_head, path))


def test_a_start_without_an_output_matrix_takes_no_draft_vocabulary() -> None:
    """A head that scores by the target's matrix has no rows to choose, so it refuses a draft
    vocabulary.
    """
    target = tiny.gemma4(5 * ("full_attention",), 20)
    config = DFlashConfig.of_target(target, 1, (2,))
    with pytest.raises(InputError, match="scores all tokens; give --draft-vocabulary 0"):
        config.started(config, (3, 4), target)


GEMMA = replace(
    tiny.gemma4(("sliding_attention", "full_attention"), 8),
    **{"vocab_size": 40, "final_logit_softcapping": 3.0, "num_hidden_layers": 7},
    layer_types=("sliding_attention",) * 6 + ("full_attention",),
)
GEMMA_TARGET = tiny.random_params(GEMMA)


def gemma_head(markov: int = 4, **changes: Any) -> tuple[DFlashConfig, Params]:
    """Return a head of DeepSeek's, whose layers are a Gemma 4's."""
    config = DFlashConfig.of_target(GEMMA, 2, (2, 4), gamma=J, anchored=True, markov=markov)
    full = GEMMA.without_window((6, 6))
    text = replace(full, num_hidden_layers=2, tie_word_embeddings=False, **changes)
    config = replace(config, text_config=text, own_embedding=True, own_output=True)
    return config, tiny.eagle_params(config, {})


@pytest.mark.parametrize(
    ("markov", "changes"),
    [(4, {}), (0, {"attention_k_eq_v": False, "final_logit_softcapping": None})],
)
def test_deepseeks_gemma_heads_score_by_their_definition(
    markov: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSeek's heads whose config.json is a Gemma 4's, with entries that say nothing of the head,
    score by their definition.
    """
    config, params = gemma_head(markov, **changes)
    save_head(tmp_path / "own", config, params, None)
    copied = {
        **{"sliding_window": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        **{"enable_moe_block": False, "use_bidirectional_attention": "vision"},
        **{"target_model_type": "gemma4_unified", "hidden_size_per_layer_input": 0},
        **{"target_text_model_type": "gemma4_unified_text", "num_anchors": 512},
    }

    def change(raw: dict[str, Any]) -> None:
        assert raw["architectures"] == ["Gemma4DSparkModel"]
        raw |= copied
        del raw["sample_from_anchor"], raw["jaxspec"], raw["draft_vocab_size"]

    path = tiny.rewritten(tmp_path / "own", tmp_path / "head", change)
    assert "layers.0.layer_scalar" in load_file(path / "model.safetensors")
    read, leaves = load_head(path)
    assert read == replace(config, target_hash="")
    jax.tree.map(np.testing.assert_array_equal, leaves, params)
    raw = json.loads((path / "config.json").read_text())
    check_gemma(raw, path, read, leaves, 1)
    with pytest.raises(InputError, match="scores with a cap, which speculators does not read"):
        export(path, tmp_path / "out", engine="speculators", target=Target("owner/name", GEMMA))
    raw |= {"layer_types": ["sliding_attention", "full_attention"]}
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="of a Gemma 4; give a head whose layers are all full"):
        load_head(path)


def check_gemma(raw: Any, path: Path, config: Any, params: Params, factor: float) -> None:
    """Compare scores with the definition's; the head may borrow the embedding, times a factor."""
    embedding, output = (
        np.asarray(leaf, np.float64)
        for leaf in (
            GEMMA_TARGET["model"]["embed_tokens"]["embedding"],
            GEMMA_TARGET["lm_head"]["weight"],
        )
    )
    tensors, (tokens, states) = load_file(path / "model.safetensors"), row()
    block = tokens[ANCHOR], J, tokens[ANCHOR + 1 : ANCHOR + J]
    theirs = reference(raw, tensors, factor * embedding, output, states[:ANCHOR], *block)
    ours = scores(config, params, GEMMA, GEMMA_TARGET)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("server", "cap"), [("vllm", 5.0), ("vllm", None), ("speculators", None)])
def test_qwen_layers_score_as_they_were_trained_for_a_gemma(
    server: Any, cap: float | None, tmp_path: Path
) -> None:
    """Heads of Qwen3 layers for a Gemma 4 score as they were trained: z-lab's read the target's
    scaled embeddings, and cap scores as their file says, or as the target does; speculators' do
    neither.
    """
    config = DFlashConfig.of_target(GEMMA, 2, (2, 4), gamma=J)
    save_head(tmp_path / "own", config, tiny.eagle_params(config, {}), None, server=server)

    def change(raw: dict[str, Any]) -> None:
        raw.pop("final_logit_softcapping", None)
        raw |= {"final_logit_softcapping": cap} if cap else {}

    path = tiny.rewritten(tmp_path / "own", tmp_path / "head", change)
    raw = json.loads((path / "config.json").read_text())
    scaled = server == "vllm"
    check_gemma(
        raw | ({"final_logit_softcapping": cap or 3.0} if scaled else {}),
        path,
        *load_head(path),
        32**0.5 if scaled else 1,
    )


def test_an_int8_heads_layers_compute_with_what_int8_holds(head: Path) -> None:
    """The loop reads an int8 head's layers as it reads the target's, and `plan` counts their
    bytes.
    """
    target = tiny.loaded(TARGET, TEXT)
    loaded = LoadedHead.load(head, target, weights="int8")
    held = flatten_dict(loaded.params, sep="/")
    names = {name.removesuffix("weight") for name in held if held[name].dtype == jnp.int8}
    assert len(names) == 2 * 7
    assert "fc/weight" not in {f"{name}weight" for name in names}
    exact = {
        name: leaf * held[f"{name.removesuffix('weight')}scale"][:, None]
        if leaf.dtype == jnp.int8
        else leaf
        for name, leaf in held.items()
        if not name.endswith("/scale")
    }
    config = load_head(head)[0]
    ours = scores(config, loaded.params)
    np.testing.assert_allclose(ours, scores(config, unflatten_dict(exact, sep="/")), atol=1e-4)
    whole = scores(config, load_head(head)[1])
    assert 0 < np.abs(ours - whole).max() < 0.1 * np.abs(whole).max()
    programs = [
        abstract_program(TEXT, [config], EngineConfig(gamma=J), jnp.bfloat16, draft_weights=weights)
        for weights in (None, "int8")
    ]
    bytes_of = [bytes_held(params["dflash"]) for _, params in programs]
    assert bytes_of[1] < 0.8 * bytes_of[0]
    with pytest.raises(InputError, match="weights: 'int4' is unknown; give int8, or leave it out"):
        LoadedHead.load(head, target, weights="int4")  # pyright: ignore


def test_a_mask_in_a_file_of_its_own_is_refused(head: Path, tmp_path: Path) -> None:
    path = tiny.rewritten(head, tmp_path / "head", {})
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"mask_embedding\.pt is not read; give a head without"):
        load_head(path)


def test_other_targets_and_servers_are_refused(head: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="DFlash heads keep their draft vocabulary; leave that"):
        export(head, tmp_path / "out", draft_vocabulary=5)
    config, params = made(WORDS)
    save_head(tmp_path / "words", replace(config, target_name=""), params, None)
    with pytest.raises(InputError, match=r"has its own output matrix, .* which sglang does not"):
        export(tmp_path / "words", tmp_path / "out", engine="sglang")
    with pytest.raises(InputError, match="its target '' has no id on the hub, so speculators cann"):
        export(tmp_path / "words", tmp_path / "out", engine="speculators")
    other = replace(TEXT, vocab_size=48)
    line = r"vocab-of owner/wrong: DFlash head: made for a target of .*owner/target"
    with pytest.raises(InputError, match=line):
        export(head, tmp_path / "out", target=Target("owner/wrong", other))
    export(head, tmp_path / "out", target=Target("elsewhere/target", TEXT))
    assert load_head(tmp_path / "out")[0].target_name == "elsewhere/target"
    target = tiny.loaded(tiny.random_params(other), other)
    with pytest.raises(InputError, match=r"made for a target of configuration .*owner/target"):
        LoadedHead.load(head, target)
