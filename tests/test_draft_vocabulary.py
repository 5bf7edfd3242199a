"""Drafts that score few tokens give these the same scores, and others none, in decoding, in
training and in files.

That nothing is lost is in tests/decoding/test_sampling_law.py and, greedy, in
tests/decoding/test_gemma.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.cli.inspect import inspect
from jaxspec.config import RotaryConfig
from jaxspec.errors import InputError
from jaxspec.heads.blocks import joined
from jaxspec.heads.loading import save_head
from jaxspec.models.families import build
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import narrowed
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.views import VIEWS
from jaxspec.publishing.export import Target, export
from jaxspec.training.conversations import ConversationBatch, TeacherRows, slots_before
from jaxspec.training.objectives import Distillation, tuning_loss
from jaxspec.training.recipes import frequent_tokens
from tests import tiny
from tests.decoding import test_greedy as greedy

TARGET, PARAMS = greedy.TARGET, greedy.TARGET_PARAMS
HEAD, HEAD_PARAMS = greedy.HEADS["KV head"]
TEXT, TEXT_PARAMS = tiny.text_only(TARGET, PARAMS)
TIED = LanguageModel(replace(TEXT.text, tie_word_embeddings=True))
WORDS = (7, 3, 11, 20, 5, 9, 14, 4, 17)
OTHERS = [word for word in range(tiny.VOCABULARY) if word not in WORDS]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 22, (2, 9)), jnp.int32)
ROWS = PromptRows(TOKENS, jnp.full(2, 9))


def logits(model: LanguageModel, params: Any) -> np.ndarray:
    return np.asarray(jax.jit(build(model.config).apply)({"params": params}, TOKENS))


@pytest.mark.parametrize("model", [TEXT, TIED], ids=["own head", "tied"])
def test_a_narrow_draft_scores_its_words_as_the_whole_one(model: LanguageModel) -> None:
    whole = logits(model, TEXT_PARAMS if model is TEXT else {"model": TEXT_PARAMS["model"]})
    draft, params = tiny.narrow(
        model, TEXT_PARAMS if model is TEXT else {"model": TEXT_PARAMS["model"]}, WORDS
    )
    few = logits(draft, params)
    np.testing.assert_allclose(few[..., WORDS], whole[..., WORDS], atol=1e-5)
    assert (few[..., OTHERS] == -np.inf).all()
    np.testing.assert_array_equal(draft.score(params, ROWS, None), few[..., WORDS])
    narrower, params = tiny.narrow(draft, params, WORDS[:4])
    np.testing.assert_allclose(
        logits(narrower, params)[..., WORDS[:4]], whole[..., WORDS[:4]], atol=1e-5
    )
    with pytest.raises(InputError, match="5 tokens, but the draft scores 4; give fewer"):
        tiny.narrow(narrower, params, WORDS[:5])


def test_a_head_scores_its_words_as_its_target_does() -> None:
    config = replace(HEAD.text_config, draft_vocabulary=WORDS)
    hidden = jnp.asarray(
        np.random.default_rng(1).normal(size=(2, TEXT.text.hidden_size)), jnp.float32
    )
    few = np.asarray(LanguageModel(config).logits(joined(HEAD_PARAMS, PARAMS, WORDS), hidden))
    np.testing.assert_allclose(few[:, WORDS], TARGET.logits(PARAMS, hidden)[:, WORDS], atol=1e-5)
    assert (few[:, OTHERS] == -np.inf).all()


@pytest.mark.parametrize("share", [None, 0.5, 1.0], ids=["answers", "both", "distilled"])
@pytest.mark.parametrize("words", [WORDS, range(12)], ids=["narrow", "fewer tokens"])
def test_training_reads_its_words_alone(share: float | None, words: Sequence[int]) -> None:
    """A loss learns only of tokens in a draft's vocabulary, or in a smaller model's."""
    params = tiny.noisy(TEXT_PARAMS, 0.2)
    if words is WORDS:
        draft, params = tiny.narrow(TEXT, params, WORDS)
    else:
        draft, params = tiny.resized(TARGET, {**PARAMS, "language_model": params}, len(words))
    mask = np.arange(9) > np.asarray([[3], [5]])
    before = TeacherRows(ROWS, {}, np.broadcast_to(np.arange(9), (2, 9)))
    taught = {"answers": slots_before(mask)} if share is None else {"teacher": before}
    batch = ConversationBatch(ROWS, mask, {}, np.arange(2, dtype=np.uint32), **taught)
    teaching: dict[str, Any] = (
        {} if share is None else {"teacher": TEXT, "distillation": Distillation(share=share)}
    )
    loss, _ = jax.jit(tuning_loss(draft, VIEWS["T"], **teaching))(
        {**params, "teacher": TEXT_PARAMS}, batch
    )

    def chances(model: LanguageModel, params: Any) -> np.ndarray:
        chances = np.exp(logits(model, params)[:, :-1, [*words]].astype(np.float64))
        return chances / chances.sum(-1, keepdims=True)

    p, q, labels = chances(TEXT, TEXT_PARAMS), chances(draft, params), np.asarray(TOKENS)[:, 1:]
    learned = mask[:, 1:] & np.isin(labels, words)
    assert 0 < learned.sum() < mask.sum()
    at = np.asarray([[words.index(word) if word in words else 0 for word in row] for row in labels])
    cross_entropy = -np.log(np.take_along_axis(q, at[..., None], -1)[..., 0])
    nats = cross_entropy + (share or 0) * ((p * np.log(p / q)).sum(-1) - cross_entropy)
    assert float(loss) == pytest.approx(nats[learned].mean(), rel=1e-4)


def test_words_are_those_that_answers_have_most_often() -> None:
    talk, encoder = tiny.Talk(), PromptEncoder.of(tiny.CONFIG, tiny.tokenizer())
    ranked = frequent_tokens(encoder, talk, 40, [2]).tolist()
    counts = Counter("".join(answer for i in range(40) for _, answer in talk[i].turns))
    letters = [
        token for token in encoder.tokenizer.convert_ids_to_tokens(ranked) if token in counts
    ]
    assert [counts[letter] for letter in letters] == sorted(counts.values(), reverse=True)
    assert ranked[0] == 2
    assert sorted(ranked) == list(range(len(encoder.tokenizer)))


def test_files(tmp_path: Path) -> None:
    """A narrow draft is read as it was written; exported it is whole, and never likelier to say
    another word.
    """
    config = replace(tiny.CONFIG.text_config, draft_vocabulary=(30, 8, 12, 40))
    params = tiny.random_params(config)
    tiny.save(tmp_path / "draft", config, params)
    found = huggingface.load(tmp_path / "draft")
    assert found.config == config
    assert inspect(tmp_path / "draft").draft_vocabulary == 4
    target = Target("a target", replace(config, vocab_size=config.vocab_size + 3))
    export(tmp_path / "draft", tmp_path / "whole", target=target)
    whole = huggingface.load(tmp_path / "whole")
    assert isinstance(whole.config, RotaryConfig)
    assert whole.config.draft_vocabulary == ()
    assert "draft_vocabulary" not in (tmp_path / "whole" / "config.json").read_text()
    ours, theirs = (
        logits(LanguageModel(config), params),
        logits(LanguageModel(whole.config), whole.params),
    )
    np.testing.assert_allclose(theirs[..., (30, 8, 12, 40)], ours[..., (30, 8, 12, 40)], atol=1e-5)
    np.testing.assert_array_equal(theirs.argmax(-1), ours.argmax(-1))
    export(tmp_path / "draft", tmp_path / "fewer", draft_vocabulary=2)
    fewer = huggingface.load(tmp_path / "fewer")
    np.testing.assert_array_equal(
        fewer.params["lm_head"]["weight"], params["lm_head"]["weight"][:2]
    )
    for name, library in (("whole", "transformers"), ("fewer", "jaxspec")):
        card = (tmp_path / name / "README.md").read_text()
        assert f"library_name: {library}\n" in card
        assert ("In transformers" in card) == (library == "transformers")
    with pytest.raises(InputError, match="a draft vocabulary of 4 tokens, not 5"):
        export(tmp_path / "draft", tmp_path / "more", draft_vocabulary=5)


def test_a_tied_draft_that_sees_is_untied_for_good(tmp_path: Path) -> None:
    config = replace(tiny.CONFIG, tie_word_embeddings=True)
    config, params = narrowed(config, tiny.random_params(config), WORDS)
    tiny.save(tmp_path / "draft", config, params)
    export(tmp_path / "draft", tmp_path / "whole")
    whole = huggingface.load(tmp_path / "whole")
    np.testing.assert_array_equal(
        whole.params["language_model"]["lm_head"]["weight"][WORDS,],
        params["language_model"]["lm_head"]["weight"],
    )


def test_files_of_heads(tmp_path: Path) -> None:
    head = replace(HEAD, text_config=replace(HEAD.text_config, draft_vocabulary=WORDS))
    save_head(tmp_path / "head", head, HEAD_PARAMS, np.float32)
    assert inspect(tmp_path / "head").draft_vocabulary == len(WORDS)
    assert export(tmp_path / "head", tmp_path / "same") == head
    fewer = export(tmp_path / "head", tmp_path / "fewer", draft_vocabulary=3)
    assert fewer.text_config.draft_vocabulary == WORDS[:3]  # type: ignore[union-attr]


def test_what_a_source_suppresses_is_a_list(tmp_path: Path) -> None:
    text = tiny.CONFIG.text_config
    path = tiny.save(tmp_path / "draft", text, tiny.random_params(text))
    (path / "generation_config.json").write_text('{"suppress_tokens": 5}')
    target = Target("a target", replace(text, vocab_size=text.vocab_size + 3))
    line = r"draft/generation_config.json: suppress_tokens 5 \(.+\); give a list of token ids"
    with pytest.raises(InputError, match=line):
        export(path, tmp_path / "out", target=target)
