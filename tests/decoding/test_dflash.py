"""A DFlash head drafts what its definition says, whatever was accepted before, and its training
pass scores what decoding does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.heads.files import Server
from jaxspec.heads.kinds.dflash.config import DFlashConfig, DFlashText
from jaxspec.heads.loading import save_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.families import text_params
from tests import tiny
from tests.tiny.dflash_reference import draft as reference
from tests.tiny.dflash_reference import states_of
from tests.tiny.families import FAMILIES, SQUARES
from tests.tiny.files import read_json
from tests.tiny.one_pass import check_draft, check_training_pass, drafted_blocks, target_states

J, NEW, BLOCKS, TEMPERATURE = 3, 24, 8, 8.0
OPTIONS: dict[str, dict[str, Any]] = {
    "llava": {"target_layers": (0, 1, 2)},
    "qwen2_5_vl": {"target_layers": (1, 2), "anchored": True, "markov": 4, "window": 12},
    "qwen3_vl": {"target_layers": (1, 2), "markov": 4, "own_embedding": True},
    "gemma4_unified": {"target_layers": (1,), "anchored": True, "markov": 4},
}
"""z-lab's form, DSpark's, and a mixture; two targets have M-RoPE, and one of them DeepStack."""
WORDS = tuple(range(3, 100))
KINDS = ["sliding_attention", "full_attention"]
OWN = {"own_embedding": True, "own_output": True}
PUBLISHERS: dict[str, tuple[str, Server, dict[str, Any], dict[str, Any]]] = {
    "z-lab": ("llava", "vllm", {"window": 9}, {"layer_types": KINDS}),
    "DeepSeek's DSpark": ("qwen2_5_vl", "vllm", OWN, {"enable_confidence_head": True}),
    "DeepSeek's DFlash": ("llava", "vllm", OWN | {"anchored": True}, {"num_anchors": 512}),
    "DeepSeek's DSpark for Gemma 4": ("gemma4_unified", "vllm", OWN, {"num_kv_shared_layers": 2}),
    "speculators' DFlash": ("llava", "speculators", {"words": WORDS, "window": 9}, {}),
    "speculators' DSpark": (
        "qwen3_vl",
        "speculators",
        {"anchored": True, "window": 9, "causal": False},
        {},
    ),
    "speculators' DSpark with masks": (
        "qwen3_vl",
        "speculators",
        {},
        {"sample_from_anchor": False},
    ),
}
"""Target, layout, fields of the head besides `OPTIONS`, and entries that the publisher writes."""
ENGINE = EngineConfig(
    gamma=J, new_buckets=(32,), prompt_buckets=(64, 128), image_buckets=(0, 1, 2, 4, 16)
)


def headed(
    family: str, words: tuple[int, ...] = (), **options: Any
) -> tuple[LoadedModel, LoadedHead]:
    """Return a target of three layers, and its head of two."""
    config, processor = (FAMILIES | SQUARES)[family]()
    if family in FAMILIES:
        config = replace(config, text_config=replace(config.text_config, num_hidden_layers=3))
    text = tiny.tokenizer() if family == "llava" else tiny.chat_tokenizer()
    params = jax.tree.map(jnp.asarray, tiny.random_params(config))
    target = LoadedModel(config, params, text, processor)
    head = DFlashConfig.of_target(config, layers=2, gamma=J + 1, **OPTIONS[family] | options)
    decoder: Any = head.text_config
    if family in SQUARES:  # its layers are the target's full ones
        decoder = replace(config.text_config.without_window((1, 1)), tie_word_embeddings=False)
    head = replace(head, text_config=replace(decoder, draft_vocabulary=words))
    head = head.for_target(config)
    return target, LoadedHead(head, tiny.eagle_params(head, text_params(config, params)))


@pytest.mark.parametrize(
    ("publisher", "tree"),
    [
        ("z-lab", None),
        *tiny.rarer(("z-lab", "2:5"), *((name, None) for name in PUBLISHERS if name != "z-lab")),
    ],
)
def test_blocks_are_drafted_as_the_publishers_files_say(
    publisher: str, tree: str | None, tmp_path: Path
) -> None:
    """Blocks of a head in its publisher's files are drafted as these say, in rows with an image,
    behind blocks of which nothing, a part or all was accepted. A block is shorter than the head's
    own.
    """
    family, server, options, changes = PUBLISHERS[publisher]
    target, head = headed(family, **options)
    save_head(tmp_path, head.config, head.params, None, server=server, overwrite=True)
    config = read_json(tmp_path / "config.json")
    del config["jaxspec"], config["sample_from_anchor"]
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    config, tensors = config | changes, load_file(tmp_path / "model.safetensors")
    head = LoadedHead.load(tmp_path, target)
    assert head.config.target_states == states_of(config)
    sizes = {"prompt_buckets": (448,), "image_buckets": (1,)} if family in SQUARES else {}
    engine = Engine(target, head, replace(ENGINE, tree=tree, **sizes))
    prompt = engine.encoder.prompt("What?", [tiny.page(0)])
    request = Request(prompt, BLOCKS * (J + 1), temperature=TEMPERATURE, seed=3)
    row = text_params(target.config, target.params)
    embedding = np.asarray(row["model"]["embed_tokens"]["embedding"], np.float64)
    output = np.asarray(row["lm_head"]["weight"], np.float64)
    blocks = list(drafted_blocks(engine, request, BLOCKS))
    longest = blocks[-1][0]  # one pass reads it: what a token reads does not change behind it
    whole, _, hidden = target_states(target, head, prompt, longest)
    row_states = hidden[0, : int(whole.length[0]) - 1]
    for answer, draft in blocks:
        states = row_states[: len(row_states) - len(longest) + len(answer)]
        drafted = np.asarray(draft.tokens)[0, : J - 1]
        scores = reference(config, tensors, embedding, output, states, answer[-1], J, drafted)[
            : 1 if tree else J
        ]
        check_draft(draft, scores, TEMPERATURE, atol=2e-6)


def test_training_predicts_the_blocks() -> None:
    check_training_pass(partial(headed, "qwen2_5_vl"), ENGINE, NEW)


def test_targets_and_blocks_that_do_not_fit() -> None:
    target = replace(tiny.CONFIG.text_config, num_hidden_layers=36)
    config = DFlashConfig.of_target(target, target_name="owner/name")
    assert config.target_states == (2, 10, 18, 26, 34)
    refuse = partial(pytest.raises, InputError)
    with refuse(match="layers .2, 2, 2, 2, 2. of 4; give target_layers .--head.target-layers"):
        DFlashConfig.of_target(replace(target, num_hidden_layers=4))
    public = replace(config, target_hash="")
    with refuse(match=r"made for a target \(owner/name\) of width 32 and .* llama of 64, "):
        public.for_target(replace(target, hidden_size=64))
    with refuse(match="with layers .2, 10, 18, 26, 34., and not for .* and 34 layers"):
        public.for_target(replace(target, num_hidden_layers=34))
    with refuse(match="made for a target of configuration .*; use the head's own target"):
        config.for_target(replace(target, rope_theta=5e5))
    with refuse(match="mask token 40 of 40 tokens"):
        DFlashConfig(DFlashText(vocab_size=40), "", mask_token=40, target_layers=(1,))
    with refuse(match="reads target layers .2, 1.; give them in order"):
        replace(config, target_layers=(2, 1))
    engine, head = headed("llava")
    with refuse(match="gamma: 5 is more than the 4 tokens that the draft writes in one pass"):
        Engine(engine, head, replace(ENGINE, gamma=5))
