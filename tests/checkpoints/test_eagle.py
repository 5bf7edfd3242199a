"""EAGLE-3 heads are read from and written to both public layouts, and others' readings of the files
agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

from jaxspec.cli import main
from jaxspec.config import LlamaConfig
from jaxspec.errors import InputError
from jaxspec.heads.kinds.eagle3.config import Eagle3Config
from jaxspec.heads.loading import is_head, load_head, read_draft_config, save_head
from jaxspec.publishing.export import export
from jaxspec.typing import Params
from tests import tiny

J, LENGTH = 3, 12
TEXT = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=5e5,
)
TARGET = tiny.random_params(TEXT)
WORDS = (9, 3, 30, 4, 17, 39, 5, 22)
"""In no order: files have them in order of their ids."""


def made(words: tuple[int, ...] = WORDS, **options: Any) -> tuple[Eagle3Config, Params]:
    config = Eagle3Config.of_target(TEXT, target_name="owner/target", gamma=J)
    config = replace(
        config, text_config=replace(config.text_config, draft_vocabulary=words, **options)
    )
    return config, tiny.eagle_params(config, TARGET)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vllm", {"words": (), "norm_before_residual": True, "sliding_window": 5}),
        ("sglang", {"own_embedding": True}),
        (
            "speculators",
            {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "sliding_window": 4},
        ),
    ],
)
def test_exports_are_read_bit_for_bit(
    engine: str, options: Any, tmp_path: Path, said: Callable[..., str]
) -> None:
    config, params = made(**options)
    save_head(tmp_path / "head", config, params, None)
    command = {
        "vllm": '"method": "eagle3"',
        "sglang": "--speculative-algorithm EAGLE3",
        "speculators": "vllm serve ",
    }
    head, out = tmp_path / "head", tmp_path / "out"
    assert command[engine] in said("export", head, out, "--for", engine)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "layers.0." if engine == "speculators" else "midlayer."
    assert tensors[f"{layer}self_attn.q_proj.weight"].shape == (64, 64)
    words = len(config.text_config.draft_vocabulary) or 40
    assert tensors["t2d"].sum() == len(tensors["d2t"]) == words
    found, read = load_head(tmp_path / "out")
    first, again = load_head(tmp_path / "head")
    assert found == first
    jax.tree.map(np.testing.assert_array_equal, read, again)
    assert "EAGLE-3 head" in said("inspect", tmp_path / "out")


def test_an_engine_gets_a_target_that_it_finds(
    tmp_path: Path, said: Callable[..., str], refusal: Callable[..., str]
) -> None:
    """Exports name a target that the engine finds: the hub's id of a model that a package ships, or
    a directory's path; files for others name no directory of this machine.
    """
    tiny.save(tmp_path / "my target", TEXT, TARGET)
    config, params = made()
    head, out, target = (str(tmp_path / name) for name in ("head", "out", "my target"))
    save_head(Path(head), replace(config, target_name="my target"), params, None)
    assert "'my target' has no id on the hub, so vllm cannot find it; give --vocab-of" in refusal(
        "export", head, out, "--for", "vllm"
    )
    same = ("--vocab-of", target, "--overwrite")
    told = said("export", head, out, "--for", "vllm", *same)
    assert f"vllm serve '{target}' --speculative-config" in told
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    said("export", head, out, "--for", "speculators", *same)
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert verifier["verifier"]["name_or_path"] == target
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    save_head(Path(head), replace(config, target_name="smollm2-135m"), params, None, overwrite=True)
    told = said("export", head, out, "--for", "sglang", "--overwrite")
    assert "--model-path HuggingFaceTB/SmolLM2-135M-Instruct --spec" in told


def test_a_head_is_not_its_own_base_model(tmp_path: Path) -> None:
    """A head's card names the target as its base model, or nothing if the target's id is not
    known.
    """
    config, params = made()
    path = tmp_path / "models--us--head" / "snapshots" / "0"
    save_head(path, replace(config, target_name="my target"), params, None)
    main(["export", str(path), str(tmp_path / "out")])
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model is None


def test_a_card_says_how_a_head_was_trained_and_what_serves_it(tmp_path: Path) -> None:
    config, params = made()
    runs = tmp_path / "run"
    save_head(runs / "hf", config, params, None)
    steps = [{"step": i, "tokens_per_pass": 2 + i % 2} for i in range(1, 41)]
    for name, before in (("second", {"first": 5}), ("first", {})):
        (runs / name).mkdir()
        options = {"steps": 1200, "batch": 4, "learning_rate": 1e-3, "before": before}
        data = [["/data/eyes_t0", 1.0, 5000, "abc"]]
        (runs / name / "train_config.json").write_text(json.dumps(options | {"data": data}))
        (runs / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n{")
    (runs / "text").mkdir()  # of `train.text`, in the same folder of runs
    run = options | {"data": ["/data/train.jsonl", 9, "abc"]}
    (runs / "text" / "train_config.json").write_text(json.dumps(run))
    table = "| row | tokens per pass | 95 % |\n|---|---:|---:|\n| head | 2.5 | 2.4 to 2.6 |"
    for name in ("other", "table"):  # of one title
        (runs / name).mkdir()
        text = f"# Tokens\n\n| a |\n\n# Intervals\n\n{table}\n\nx\n"
        (runs / name / "table.md").write_text(text)
    main(["export", str(runs / "hf"), str(tmp_path / "out"), "--licence", "qwen=https://a.b/c"])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "base_model": "owner/target",
        "base_model_relation": "adapter",
        "library_name": "jaxspec",
        "license": "other",
        "license_link": "https://a.b/c",
        "license_name": "qwen",
        "tags": ["speculative-decoding", "eagle3"],
    }
    first, second = (line for line in card.text.splitlines() if "1,200 steps" in line)
    assert first.startswith(
        "| first | 1,200 steps of 4 samples, peak rate 0.001, on eyes_t0 (5,000"
    )
    assert second.endswith(
        "; 2.50 tokens per pass, simulated on the last 4 logged batches (95 %: 1.93 to 3.07) |"
    )
    assert f"## Tokens\n\n{table}\n" in card.text
    assert f"## Tokens (table)\n\n{table}\n" in card.text
    assert "vllm serve owner/target --speculative-config" in card.text
    assert "sglang.launch_server --model-path owner/target" in card.text


GOLDEN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "bos_token_id": 1,
    "draft_vocab_size": 8,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "eos_token_id": 2,
    "fc_norm": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": 5e5,
    "target_hidden_size": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 40,
}
"""vLLM's layers are states after so many layers, to SGLang's it adds 1."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "head"
    save_head(path, *made(), None)
    return path


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_configurations_are_what_engines_read(head: Path, tmp_path: Path, engine: str) -> None:
    main(["export", str(head), str(tmp_path / "out"), "--for", engine])
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    del raw["jaxspec"]
    assert raw == GOLDEN


@pytest.mark.parametrize(
    "option", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm"]
)
def test_an_engine_gets_no_head_of_which_it_leaves_out_a_part(option: str, tmp_path: Path) -> None:
    save_head(tmp_path / "head", *made(**{option: True}), None)
    for engine in ("sglang", *(("vllm", "speculators") if option == "qk_norm" else ())):
        with pytest.raises(InputError, match=f"has {option}, which {engine} does not read"):
            export(tmp_path / "head", tmp_path / "out", engine=engine)  # pyright: ignore


NESTED = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "jaxspec": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "eagle_config": None,
}


@pytest.mark.parametrize(
    ("entries", "layer"),
    [
        ({}, ""),
        ({"num_hidden_layers": 40}, ""),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}, ""),
        ({"architectures": ["LlavaForConditionalGeneration"], "model_type": None}, ""),
        ({"draft_vocab_size": None}, ""),  # known by its tensors
        ({"eagle_config": NESTED}, "model.layers.0."),
        (
            {
                "eagle_config": NESTED
                | {"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True}
            }
            | {"logit_scale": 1.0, "fc_norm": False}
            | {"sliding_window": 32768, "use_sliding_window": False},
            "layers.0.",
        ),
        (
            {
                "eagle_config": {
                    "next_layer_regular": True,
                    "parallel_draft_step": 1,
                    "use_mtp_layernorm": False,
                }
            }
            | {"parallel_draft_heads_num_layers": 1}
            | {"sliding_window": 512, "layer_types": ["full_attention"]},
            "",
        ),
        ({"sliding_window": 512, "max_window_layers": 1}, ""),
        ({"sliding_window": 512}, ""),
    ],
)
def test_heads_are_read_as_publishers_write_them(
    head: Path, tmp_path: Path, entries: dict[str, Any], layer: str
) -> None:
    """Publishers' heads give the parameters of ours, whatever prefix (`layer`) they give the
    layer.
    """
    stored = load_file(head / "model.safetensors")
    tensors: dict[str, Any] = {"d2t": stored["d2t"].astype(np.int32)}
    for name in (name for name in stored if layer and name.startswith("midlayer.")):
        tensors |= {name.replace("midlayer.", layer): stored[name], name: None}
    path = tiny.rewritten(head, tmp_path / "head", PLAIN | entries, tensors)
    assert is_head(path)
    config, params = load_head(path)
    first, own = load_head(head)
    jax.tree.map(np.testing.assert_array_equal, params, own)
    assert config.for_target(TEXT).text_config == first.text_config


def test_deepseeks_heads_read_five_states(tmp_path: Path) -> None:
    """DeepSeek's heads, of Qwen3 layers, are read: they number from 0 the layers whose outputs they
    read.
    """
    layers = (1, 2, 4, 5, 6)
    config = Eagle3Config.of_target(TEXT, target_layers=layers)
    more = {"qk_norm": True, "own_embedding": True}
    config = replace(config, text_config=replace(config.text_config, **more))
    params = tiny.eagle_params(config, TARGET)
    save_head(tmp_path / "own", config, params, None)
    entries = PLAIN | {
        **{"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "draft_vocab_size": None},
        **{"target_layer_ids": [0, 1, 3, 4, 5], "num_target_layers": 7, "ttt_length": 7},
        **{"step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "use_sliding_window": False},
    }
    path = tiny.rewritten(tmp_path / "own", tmp_path / "head", entries, {"d2t": None, "t2d": None})
    assert isinstance(read_draft_config(path), Eagle3Config)
    read, leaves = load_head(path)
    assert read.target_states == layers
    assert read.for_target(TEXT).text_config == config.text_config
    jax.tree.map(np.testing.assert_array_equal, leaves, params)


@pytest.mark.parametrize("words", [(), WORDS])
def test_deepseeks_head_for_a_gemma_is_read_and_written(
    words: tuple[int, ...], tmp_path: Path, said: Callable[..., str]
) -> None:
    """The layer of DeepSeek's head for a Gemma is read as the target's full one, and stays so in
    further training; no server reads it.
    """
    target = replace(tiny.gemma4(("sliding_attention", "full_attention"), 8), vocab_size=40)
    text = tiny.gemma_eagle(target, target_layers=(1, 2), draft_vocabulary=words)
    config = Eagle3Config(replace(text, own_embedding=True), "", target_name="owner/target")
    params = tiny.eagle_params(config, {})
    save_head(tmp_path / "own", config, params, None)
    said("export", tmp_path / "own", tmp_path / "head")
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (raw["architectures"], raw["target_layer_ids"]) == (["Gemma4Eagle3Model"], [0, 1])
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert "layers.0.layer_scalar" in tensors
    assert "layers.0.self_attn.v_proj.weight" not in tensors
    read, leaves = load_head(tmp_path / "head")
    assert read == replace(config, text_config=read.text_config)
    assert read.for_target(target).text_config == replace(
        config.text_config, draft_vocabulary=tuple(sorted(words))
    )
    fresh = Eagle3Config.of_target(target, target_layers=(1, 2))
    assert fresh.started(read, (), target).text_config == read.text_config
    order = np.argsort(words) if words else slice(None)
    sort = {"lm_head": {"weight": params["lm_head"]["weight"][order]}}
    jax.tree.map(np.testing.assert_array_equal, leaves, params | sort)
    with pytest.raises(InputError, match="has qk_norm, which vllm does not read"):
        export(tmp_path / "head", tmp_path / "served", engine="vllm")
    assert "EAGLE-3 head" in said("inspect", tmp_path / "head")
    layers = {"num_hidden_layers": 2, "layer_types": 2 * ["full_attention"]}
    two = tiny.rewritten(tmp_path / "head", tmp_path / "two", layers, {})
    with pytest.raises(InputError, match="num_hidden_layers 2; give 1"):
        load_head(two)


FC = np.zeros((32, 64), np.float32)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fc_norm": True}, "fc_norm.0.weight is missing"),
        ({"logit_scale": 0.5}, "has logit_scale 0.5, which"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping 30.0, which is not"),
        ({"rope_is_neox_style": False}, "has rope_is_neox_style false, which is not supported"),
        *(
            ({part: {"is_neox_style": False}}, "has is_neox_style false, which is not")
            for part in ("eagle_config", "transformer_layer_config")
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state false"),
        (
            {"eagle_config": {"use_last_layernorm": False, "parallel_draft_step": 4}},
            "use_last_layernorm false, para",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
            r"fc.weight is \[32, 96\], config.json asks for \[32, 128\]",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [-3, 1, 2]},
            r"reads target layers \[-3, 1, 2\]; give them in order, from 0 on",
        ),
        (
            PLAIN | {"eagle_config": NESTED | {"eagle_aux_hidden_state_layer_ids": [-3, 1, 2]}},
            r"\[-2, 2, 3\]; give them",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": "all"},
            "target_layers 'all' is not supported|not readable",
        ),
        ({"eagle_config": "x"}, "EAGLE-3 head: config.json is not readable .*; fetch it again"),
        ({"draft_vocab_size": -5}, "draft_vocab_size -5; give 1 or more"),
        ({"draft_vocab_size": 4.5}, "draft_vocab_size 4.5; give 1 or more"),
        ({"draft_vocab_size": 7}, r"d2t I64 \[8\] has not 7 tokens"),
        (
            {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]},
            "a DFlash2 head; give",
        ),
        (
            {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]},
            "a P-EAGLE head; give",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle"]},
            "layers.0.input_layernorm.weight is unexpected|d2t is unexpected",
        ),
        (
            PLAIN | {"draft_vocab_size": None, "medusa_head.0.0.linear.weight": FC},
            "a Medusa head; give one of KV",
        ),
        (
            {"fc.weight": np.zeros((32, 128), np.float32)},
            r"fc.weight is \[32, 128\], config.json asks for \[32, 96\]",
        ),
        ({"layers.1.mlp.up_proj.weight": FC}, "has 2 layers; give a head with one"),
        ({"midlayer.self_attn.q_proj.bias": np.zeros(64, np.float32)}, "q_proj.bias is unexpected"),
        ({"d2t": None}, "the files lack d2t"),
        ({"layers.0.mlp.up_proj.weight": FC}, r"layers.0.*up_proj.weight and midlayer.*are the sa"),
        ({"d2t": np.zeros((2, 4), np.int64)}, r"d2t I64 \[2, 4\] is not a list of integers"),
        ({"d2t": np.zeros(8, np.float32)}, r"d2t F32 \[8\] is not a list of integers"),
        ({"d2t": np.zeros(0, np.int64)}, r"d2t I64 \[0\] has not 8 tokens"),
        ({"d2t": np.full(8, 33)}, "names token 40 of 40; fetch"),
        ({"d2t": np.full(8, -1)}, "names token -1 of 40; fetch"),
        ({"d2t": np.full(8, 2**63 - 1)}, "names token -?[0-9]+ of 40; fetch"),
        ({"d2t": 9 - np.arange(8)}, "names a token twice"),
        (
            {"target_hidden_size": 48, "fc.weight": np.zeros((32, 144), np.float32)},
            "width 32, but it borrows embed_tokens or lm_head from a target of width 48; give",
        ),
    ],
)
def test_what_this_library_lacks_is_named(
    head: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """A change of config.json or of tensors that this library cannot read is named in one line."""
    tensors = {name: x for name, x in changes.items() if "." in name or name == "d2t"}
    entries = {name: x for name, x in changes.items() if name not in tensors}
    path = tiny.rewritten(head, tmp_path / "head", entries, tensors)
    assert is_head(path)
    assert re.search(told, tiny.one_line(load_head, path))
