"""A Gemma 4's assistant drafts what its definition says, and changes no answer of its target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eval.lib.drafts.forward import whole_row
from jaxspec import Engine, EngineConfig, LoadedModel, Request, load_draft
from jaxspec.config import Gemma4TextConfig
from jaxspec.decoding.drafting.shapes import parse_tree, static_tree
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.engine.batches import batcher
from jaxspec.errors import InputError
from jaxspec.heads.blocks import joined, read_blocks, read_whole
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.loading import save_head
from jaxspec.heads.making import abstract_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.tiny.assistant_reference import draft as reference
from tests.tiny.files import read_json
from tests.tiny.one_pass import check_draft, drafted_blocks
from tests.tiny.oracles import goodness_of_fit, numpy_distribution

J, NEW, BLOCKS, TEMPERATURE = 3, 24, 6, 8.0
SLIDING, FULL = "sliding_attention", "full_attention"
TEXT = tiny.gemma4((SLIDING, FULL, SLIDING, FULL), sliding_window=5)
SHARED = tiny.gemma4((SLIDING, FULL) * 3, sliding_window=5, **tiny.E2B)
"""A decoder whose last layers read the keys of the two layers before them."""
LAYERS: dict[str, Any] = {
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": (SLIDING, SLIDING, FULL),
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
WORDS = ("What is this?", "Hi", "Tell me more")
SIZES = EngineConfig(batch_size=3, new_buckets=(32,), prompt_buckets=(32, 128), gamma=J)


def pair(groups: int = 0, text: Gemma4TextConfig = TEXT) -> tuple[LoadedModel, LoadedHead]:
    """Return a target that mostly walks through its tokens in one order, and a like assistant."""
    rng = np.random.default_rng(0)
    params = tiny.random_params(text, scale=0.3)
    embedding = params["model"]["embed_tokens"]["embedding"]
    params["lm_head"]["weight"] = embedding[rng.permutation(text.vocab_size)]
    target = tiny.loaded(params, text, tiny.chat_tokenizer())
    width = text.hidden_size
    config = AssistantConfig(replace(text, **LAYERS), backbone_hidden_size=width, gamma=J)
    if groups:
        config = replace(config, num_centroids=groups, centroid_intermediate_top_k=groups // 2)
    initial = jax.tree.map(
        lambda x: (
            rng.uniform(0.1, 0.3, x.shape) if x.ndim == 1 else rng.normal(0, 0.3, x.shape)
        ).astype(x.dtype),
        abstract_head(config),
    )
    initial["model"]["norm"]["weight"][:] = 1
    for i in range(len(config.text_config.layer_types)):
        initial["model"][f"layers_{i}"]["layer_scalar"] += 0.7
    matrix = initial["pre_projection"]["weight"]
    matrix *= 0.1
    matrix[:, :width] += np.eye(width)
    initial["model"]["embed_tokens"]["embedding"] = params["lm_head"]["weight"]
    if groups:
        initial["masked_embedding"]["token_ordering"] = rng.permutation(text.vocab_size).astype(
            "i4"
        )
    return target, LoadedHead(config.for_target(text), jax.tree.map(jnp.asarray, initial))


def engine(models: tuple[LoadedModel, LoadedHead], drafts: bool = True, **options: Any) -> Engine:
    target, head = models
    return Engine(target, [head] * drafts, replace(SIZES, **options))


def requests() -> list[Request]:
    return [Request(words, NEW - 3 * i) for i, words in enumerate(WORDS)]


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedHead]:
    return pair(text=SHARED)


@pytest.fixture(scope="module")
def plain(models: tuple[LoadedModel, LoadedHead]) -> list[tuple[int, ...]]:
    return tiny.tokens(engine(models, drafts=False).generate(requests()))


@pytest.mark.parametrize(
    ("text", "groups", "tree"),
    [(TEXT, 0, None), *tiny.rarer((SHARED, 8, None), (SHARED, 0, "2:6"))],
)
def test_blocks_are_drafted_as_the_definition_says(
    tmp_path: Path, text: Gemma4TextConfig, groups: int, tree: str | None
) -> None:
    """Blocks of an assistant that is read from files, in rows longer than the window, are drafted
    as the files say. Training scores the same blocks alike.
    """
    target, head = pair(groups, text=text)
    save_head(tmp_path / "head", head.config, head.params, jnp.float32)
    read = load_draft(tmp_path / "head", target)
    assert isinstance(read, LoadedHead)
    assert read.config == head.config
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
    config = read_json(tmp_path / "head" / "config.json")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    embedding = np.asarray(target.params["model"]["embed_tokens"]["embedding"], np.float64)
    embedding *= TEXT.hidden_size**0.5
    one = Engine(target, read, replace(SIZES, batch_size=1, tree=tree))
    prompt = one.encoder.prompt("What is this?", [])
    request = Request(prompt, BLOCKS * (J + 1), temperature=TEMPERATURE, seed=3)
    spec = parse_tree(tree, J) if tree else None
    for answer, draft in drafted_blocks(one, request, BLOCKS):
        keys, state = read_row(target, prompt, answer)
        drafted = np.asarray(draft.tokens)[0]
        score = partial(reference, config, tensors, keys, embedding, state)
        if spec is None:
            scores = score([answer[-1], *drafted[: J - 1]])
        else:
            shape = static_tree(spec, J)
            lineages = [np.flatnonzero(shape.seen[node]) for node in shape.inner]
            paths = [[answer[-1], *drafted[nodes[1:] - 1]] for nodes in lineages]
            scores = np.stack([score(path)[-1] for path in paths])
        check_draft(draft, scores, TEMPERATURE, atol=2e-6)
        if not groups and tree is None:
            rows, _ = whole_row(target, prompt, [*answer, *drafted[: J - 1].tolist()])
            inputs = target.params, read.params, rows
            trained = training_scores(target.model, read.config, *inputs)
            np.testing.assert_allclose(trained, scores, atol=1e-4)


@partial(jax.jit, static_argnums=(0, 1))
def training_scores(
    model: LanguageModel, config: AssistantConfig, params: Any, head: Any, rows: PromptRows
) -> jax.Array:
    """Return the scores [J, V] in training of the block of a row's last J tokens."""
    (reading,) = read_whole(model, params, rows, None, config)
    block = (rows.length[0] - J + jnp.arange(J))[None, None]
    hidden = read_blocks(config, head, params, reading, rows, block, None)
    decoder = LanguageModel(config.text_config)
    return decoder.scores(joined(head["model"], params), hidden)[0, 0]


@partial(jax.jit, static_argnums=0)
def read_rows(model: LanguageModel, params: Any, rows: PromptRows) -> Any:
    """Return the hidden states of rows, and their cache."""
    return model.read(params, model.embed(params, rows, None), rows, rows.tokens.shape[1])


def read_row(target: LoadedModel, prompt: Any, answer: list[int]) -> tuple[Any, np.ndarray]:
    """Return the keys and values of each kind's last layer that makes some, and the target's last
    hidden state.
    """
    rows, _ = whole_row(target, prompt, answer)
    length = int(rows.length[0]) - 1
    hidden, cache = read_rows(target.model, target.params, rows)
    exact = partial(np.asarray, dtype=np.float64)
    keys = {
        kind: tuple(exact(leaf[i])[0, :, :length].swapaxes(0, 1) for leaf in (cache.k, cache.v))
        for kind, i in ((SLIDING, 2), (FULL, 3))
    }
    return keys, exact(hidden)[0, length - 1]


@pytest.mark.parametrize(
    "options", [{}, *tiny.rarer({"tree": "dynamic:2:6", "gamma": 4})], ids=["chain", "tree"]
)
def test_answers_are_the_plain_ones(
    models: Any, plain: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "FIRST", 8)
    results = engine(models, **options).generate(requests())
    assert tiny.tokens(results) == plain
    assert sum(int(result.stats.accepted_at.sum()) for result in results) > 8
    assert len({token for answer in plain for token in answer}) > 8


@pytest.mark.full
def test_groups_of_tokens_change_no_answer() -> None:
    """Answers are the plain ones if an assistant scores only some groups of tokens, as E2B's."""
    grouped = pair(groups=8, text=SHARED)
    plain, results = (engine(grouped, drafts).generate(requests()) for drafts in (False, True))
    assert tiny.tokens(results) == tiny.tokens(plain)
    assert sum(int(result.stats.accepted_at.sum()) for result in results) > 8


@pytest.mark.full
def test_a_mesh_changes_no_answer(models: Any, plain: Any) -> None:
    target, head = models
    split = tiny.split(target, make_mesh(model=2)), head
    assert tiny.tokens(engine(split).generate(requests())) == plain


def test_samples_follow_the_targets_law() -> None:
    """The first two tokens of sampled rows follow full passes of the target."""
    rows, rounds, words = 2000, 4, 6
    text = replace(SHARED, vocab_size=words)
    target, head = pair(text=text)
    start = [1, 4, 3]
    prompt = PromptRows(jnp.tile(jnp.asarray(start), (rows, 1)), jnp.full(rows, len(start)))
    batch = PromptBatch(prompt, None, jnp.ones((rows, 1)), (None,))
    model = target.model
    spec = tiny.speculator(model, model, ("head",), 2, head=head.config)
    params, counts = tiny.params_of(spec, target.params, head=head.params), np.zeros((words, words))
    blocks = np.zeros(3, int)
    for seed in range(rounds):
        options = tiny.sampling(rows, 3.0, new=2, seed=seed, eos=(-1,))
        state = tiny.run_speculative(spec, params, batch, options, 2)
        np.add.at(counts, tuple(np.asarray(state.tokens)[:, :2].T), 1)
        blocks += np.asarray(state.stats.histogram).sum(0)
    assert blocks.min() >= 0
    assert (blocks[:2] > 500).all()

    score = jax.jit(LanguageModel.score, static_argnums=0)

    def after(token: int | None) -> np.ndarray:
        row = jnp.asarray([[*start, *([] if token is None else [token])]])
        logits = score(model, target.params, PromptRows(row, jnp.full(1, row.shape[1])), None)
        return numpy_distribution(np.asarray(logits)[0, -1], 3.0, 0, 1.0)

    law = after(None)[:, None] * np.stack([after(token) for token in range(words)])
    assert goodness_of_fit(counts, law) > 1e-3


def test_other_targets_are_refused() -> None:
    _, head = pair()
    refuse = partial(pytest.raises, InputError)
    with refuse(match="made for a Gemma 4 of width 32 .* and this gemma4_text has width 64"):
        head.config.for_target(replace(TEXT, hidden_size=64))
    with refuse(match="and this llama has width"):
        head.config.for_target(tiny.CONFIG.text_config)
    with refuse(match="4 heads of 16 in a full_attention layer, and the target's has 1 of 32"):
        head.config.for_target(replace(TEXT, global_head_dim=32))
    assert head.config.for_target(SHARED).key_layers == (2, 2, 3)
    with refuse(match="reads sliding_attention layers, and the target has none"):
        head.config.for_target(replace(TEXT, layer_types=(FULL,) * 4))
    with refuse(match="7 groups of"):
        replace(head.config, num_centroids=7)
