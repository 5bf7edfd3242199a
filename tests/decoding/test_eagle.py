"""EAGLE-1 and EAGLE-3 heads draft what their definitions say, whatever was accepted before, and
change no answer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.config import RopeScaling, text_config
from jaxspec.errors import InputError
from jaxspec.heads.files import Server
from jaxspec.heads.kinds.eagle1 import Eagle1Config
from jaxspec.heads.kinds.eagle3.config import Eagle3Config
from jaxspec.heads.kinds.vispec import VispecConfig
from jaxspec.heads.loading import save_head
from jaxspec.heads.making import new_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.families import text_params
from tests import tiny
from tests.tiny import families
from tests.tiny.eagle_reference import draft as reference
from tests.tiny.eagle_reference import states_of
from tests.tiny.files import read_json
from tests.tiny.one_pass import check_draft, check_training_pass, drafted_blocks, target_states

J, NEW, BLOCKS = 3, 24, 6
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", {"window": 9}, {}),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        | {"sliding_window": 9},
    ),
    "one-dimensional": ("qwen2_5_vl", {}, {"rope_scaling": RopeScaling()}),
    "EAGLE-3.1": ("qwen2_5_vl", {"images": "zero"}, {"fc_norm": True, "norm_output": True}),
    "five states": (
        "llava",
        {"target_layers": (0, 1, 1, 2, 2)},
        {"qk_norm": True, "own_embedding": True},
    ),
    "Gemma 4": ("gemma4_unified", {"target_layers": (0, 1, 1, 2, 2)}, {"own_embedding": True}),
    "shown images": ("qwen3_vl", {"images": "embedding"}, {}),
    "SGLang": ("llava", {"target_layers": (1, 1, 2)}, {"own_embedding": True}),
    "no output matrix": ("llava", {}, {"qk_norm": True}),
    "EAGLE-1": ("llava", {"feature": "eagle1"}, {}),
    "MSD": (
        "llava",
        {"feature": "eagle1", "images": "unfused"},
        {"fc_bias": True, "own_embedding": True, "rows": 100},
    ),
    "MSD, Qwen": (
        "qwen2_5_vl",
        {"feature": "eagle1", "images": "unfused"},
        {"fc_bias": True, "qkv_bias": True, "own_embedding": True, "input_norm": True},
    ),
    "EAGLE-1, shown images": (
        "qwen2_5_vl",
        {"feature": "eagle1", "images": "embedding"},
        {"qkv_bias": True},
    ),
    "ViSpec": ("llava_next", {"feature": "eagle1"}, {"fc_bias": True, "own_embedding": True}),
    "ViSpec, biases": ("qwen2_5_vl", {"feature": "eagle1"}, {"qkv_bias": True}),
    "EAGLE-1, zeros": ("qwen3_vl", {"feature": "eagle1", "images": "zero"}, {}),
}
"""Target's family, words of `new_head`, and fields of the head's decoder."""
_TOP: dict[str, Any] = {"eagle_config": None, "architectures": ["LlamaForCausalLM"]}
_NESTED: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": None,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 0]},
}
_MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
PUBLISHERS: dict[str, tuple[str, Server, dict[str, Any]]] = {
    "llava": ("yuhuili--EAGLE3-Vicuna", "vllm", _TOP),
    "qwen2_5_vl": ("RedHatAI--Qwen2.5-VL-speculator.eagle3", "speculators", {}),
    "one-dimensional": ("nvidia--Qwen2.5-VL-Eagle3", "vllm", _NESTED),
    "EAGLE-3.1": ("Cloudriver--EAGLE3-Qwen2.5-VL-7B-Instruct", "vllm", _TOP),
    "five states": (
        "deepseek-ai--eagle3_ttt7",
        "vllm",
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "draft_vocab_size": None}
        | {**_NESTED, "eagle_config": None, "target_layer_ids": [-1, 0, 0, 1, 1]}
        | {"draft_num_hidden_layers": 1, "ttt_length": 7, "layer_types": ["full_attention"]},
    ),
    "Gemma 4": (
        "deepseek-ai--eagle3_gemma4_12b_ttt7",
        "vllm",
        {"draft_vocab_size": None, "ttt_length": 7, "num_kv_shared_layers": 2}
        | {"target_model_type": "gemma4_unified", "model_type": "gemma4_text"}
        | {"use_bidirectional_attention": "vision", "sliding_window": 1024},
    ),
    "shown images": ("Rayzl--qwen2.5-vl-7b-eagle3-sgl", "vllm", _TOP),
    "SGLang": ("own", "sglang", {}),
    "EAGLE-1": ("yuhuili--EAGLE-Vicuna", "vllm", {"architectures": ["LlamaForCausalLM"]}),
    "MSD": ("msd", "vllm", {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava"}),
    "MSD, Qwen": (
        "msd",
        "vllm",
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
        | {"rope_scaling": _MROPE, "rope_parameters": None, "vision_config": {"depth": 32}},
    ),
    "EAGLE-1, shown images": ("Cloudriver--EAGLE-Qwen2.5-VL-7B", "vllm", {}),
    "ViSpec": ("JLKang--ViSpec", "vllm", {"architectures": ["LlavaNextForConditionalGeneration"]}),
    "ViSpec, biases": ("JLKang--ViSpec", "vllm", {"architectures": ["Qwen2ForCausalLM"]}),
}
"""Cases as publishers write them: hub id, layout, and entries of config.json; None removes one."""
ENGINE = EngineConfig(
    gamma=J, new_buckets=(32,), prompt_buckets=(64, 128), image_buckets=(0, 1, 2, 4, 16)
)


@cache
def target_of(family: str) -> LoadedModel:
    config, processor = (families.FAMILIES | families.SQUARES)[family]()
    words = tiny.tokenizer() if text_config(config).model_type == "llama" else tiny.chat_tokenizer()
    params = jax.tree.map(jnp.asarray, tiny.random_params(config))
    return LoadedModel(config, params, words, processor)


def headed(case: str, words: tuple[int, ...] = ()) -> tuple[LoadedModel, LoadedHead]:
    family, kind, fields = CASES[case]
    target = target_of(family)
    eagle3 = {"feature": "fused", "target_layers": (0, 1, 1)}
    kind = kind if "feature" in kind else eagle3 | kind
    config = new_head(target.config, gamma=J, **kind)
    decoder = config.text_config
    if case == "Gemma 4":  # its layer is the target's full one
        decoder = tiny.gemma_eagle(target.model.text, target_layers=decoder.target_layers)
    text = replace(decoder, draft_vocabulary=words, **fields)
    config = replace(config, text_config=text)
    if case.startswith("ViSpec"):
        config = VispecConfig(text, config.target_hash, gamma=J)
    return target, LoadedHead(
        config, tiny.eagle_params(config, text_params(target.config, target.params))
    )


def published(case: str, head: LoadedHead, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a head as its publisher does; return its directory, and its config.json."""
    name, server, changes = PUBLISHERS.get(case, ("own", "vllm", {}))
    path = folder / f"models--{name}" / "snapshots" / "1234"
    path.parent.mkdir(parents=True)
    save_head(path, head.config, head.params, None, server=server)
    raw = read_json(path / "config.json") | changes
    if case in PUBLISHERS:
        del raw["jaxspec"]
    raw = {key: value for key, value in raw.items() if value is not None}
    (path / "config.json").write_text(json.dumps(raw))
    if case == "no output matrix":
        path = tiny.rewritten(path, folder / "head", {}, {"lm_head.weight": None})
    return path, raw


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        *((case, None) for case in ("llava", "MSD", "ViSpec")),
        *tiny.rarer(
            *((case, None) for case in CASES if case not in ("llava", "MSD", "ViSpec")),
            ("MSD", "2:5"),
        ),
    ],
)
def test_blocks_are_drafted_as_the_publishers_files_say(
    case: str, tree: str | None, tmp_path: Path
) -> None:
    """Blocks of a head in its publisher's files are drafted as these say, in rows with two images,
    behind blocks of which more or less was accepted.
    """
    words = tuple(range(3, 100)) if tree is None and "feature" not in CASES[case][1] else ()
    target, made = headed(case, () if case in ("five states", "Gemma 4") else words)
    path, config = published(case, made, tmp_path)
    head, tensors = LoadedHead.load(path, target), load_file(path / "model.safetensors")
    rule, eagle1 = made.config.images, isinstance(head.config, Eagle1Config)  # pyright: ignore
    assert eagle1 or head.config.target_states == states_of(config)
    engine = Engine(target, head, replace(sized(case), tree=tree))
    prompt = engine.encoder.prompt("What?", [tiny.page(0), tiny.page(1)])
    request = Request(prompt, NEW, temperature=8.0, seed=3)
    row = text_params(target.config, target.params)
    embedding = np.asarray(row["model"]["embed_tokens"]["embedding"], np.float64)
    output = np.asarray(row["lm_head"]["weight"], np.float64)
    if case == "no output matrix":
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = output[list(words)]
    blocks = list(drafted_blocks(engine, request, BLOCKS))
    longest = blocks[-1][0]  # one pass reads it: what a token reads does not change behind it
    row_tokens, row_states, row_places, images = read_row(target, head, prompt, longest)
    for answer, draft in blocks:
        end = len(row_tokens) - len(longest) + len(answer)
        tokens, states, places = row_tokens[:end], row_states[: end - 1], row_places[: end - 1]
        drafted = np.asarray(draft.tokens)[0, : J - 1] if tree is None else ()
        scores = reference(
            *(config, tensors, embedding, states, tokens, places, drafted, images),
            *(output if eagle1 else None, rule),
        )
        check_draft(draft, scores, 8.0, atol=2e-5 if eagle1 else 2e-6)


def sized(case: str) -> EngineConfig:
    squares = {"prompt_buckets": (448,), "image_buckets": (2,)}
    return replace(ENGINE, **squares if CASES[case][0] in families.SQUARES else {})


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen2_5_vl", "MSD", "Gemma 4"])
def test_one_pass_predicts_the_blocks(case: str) -> None:
    check_training_pass(partial(headed, case), sized(case), NEW)


@pytest.mark.full
def test_a_vispec_head_changes_no_answer() -> None:
    """A ViSpec head changes no answer to prompts of 0 to 3 images, nor in a conversation whose
    second image comes later.
    """
    target, head = headed("ViSpec")
    settings = replace(ENGINE, tree="dynamic:2:6", batch_size=4)
    plain, drafted = (Engine(target, draft, settings) for draft in (None, head))
    pages = [tiny.page(i) for i in range(3)]
    requests = [Request(plain.encoder.prompt("What?", pages[:count]), NEW) for count in range(4)]
    assert tiny.tokens(drafted.generate(requests)) == tiny.tokens(plain.generate(requests))
    turns = [("What?", pages[:1]), ("And this?", pages[1:2])]
    tiny.check_session(drafted, turns, plain=plain)


def read_row(
    target: LoadedModel, head: LoadedHead, prompt: Any, answer: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """Return the row's tokens; the target's states and positions of all tokens except the newest;
    and what the target shows at the slots of images.
    """
    rows, embeds, hidden = target_states(target, head, prompt, answer)
    length = int(rows.length[0])
    places = np.arange(rows.tokens.shape[1])[None]
    if rows.rotary is not None and head.config.text_config.rope_scaling.mrope_section:
        places = np.asarray(rows.rotary)[0]
    places = np.broadcast_to(places, (3, rows.tokens.shape[1]))[:, : length - 1].T
    pictures = np.flatnonzero(
        np.asarray(rows.tokens)[0, :length] == target.config.image_token_index
    )
    shown = {int(slot): embeds[slot, : target.model.text.hidden_size] for slot in pictures}
    return np.asarray(rows.tokens)[0, :length], hidden[0, : length - 1], places, shown


def test_other_targets_are_refused() -> None:
    target = replace(tiny.CONFIG.text_config, num_hidden_layers=8)
    config = Eagle3Config.of_target(target)
    assert config.target_states == (2, 4, 5)
    public = replace(
        config, target_hash="", text_config=replace(config.text_config, target_layers=())
    )
    assert public.for_target(target).target_states == (2, 4, 5)
    refuse = partial(pytest.raises, InputError)
    with refuse(match="layers .2, 3, 3. of 6; give target_layers .--head.target-layers"):
        public.for_target(replace(target, num_hidden_layers=6))
    with refuse(match="made for a target of width 32 and"):
        public.for_target(replace(target, hidden_size=64))
    with refuse(match="made for a target of configuration"):
        config.for_target(replace(target, rope_theta=5e5))
