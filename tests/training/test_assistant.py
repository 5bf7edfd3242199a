"""A Gemma 4's assistant learns from its target as it drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.checkpoints.huggingface import save
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.head import Places, Reading, empty_room
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.loading import load_head, save_head
from jaxspec.heads.making import init_head, module_of, new_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.layers import apply
from jaxspec.publishing.export import export
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage
from jaxspec.typing import Params
from tests import tiny
from tests.decoding.test_assistant import FULL, SHARED, SLIDING, TEXT, J, engine, pair, requests
from tests.tiny import training
from tests.tiny.assistant_reference import draft as reference
from tests.tiny.files import read_json
from tests.tiny.training import train_head
from tests.training.test_kv_head import check_loss

HEAD: dict[str, Any] = {"feature": "assistant", "layers": 3, "width": 32, "gamma": J}
SHALLOW = tiny.gemma4((SLIDING, FULL), sliding_window=5)
"""A target with fewer layers than its assistant."""
TRAIN = TrainConfig(
    steps=40, batch=4, learning_rate=1e-2, warmup=4, log_every=1, mesh=MeshConfig(data=1)
)


def test_its_loss_is_that_of_its_definition() -> None:
    """An assistant's loss is that of its definition, by the reference in numpy. A soft cap bounds
    the target's scores, and not the assistant's, and the target's layers have embeddings of their
    own.
    """
    target, head = pair(text=SHARED)
    raw, tensors = head.config.to_dict(), named_tensors(head.params)
    width, output = TEXT.hidden_size, np.asarray(target.params["lm_head"]["weight"]).T
    embedding = np.asarray(target.params["model"]["embed_tokens"]["embedding"], np.float64)
    embedding *= width**0.5

    def scored(read: Any, tokens: np.ndarray, b: int, anchor: int) -> np.ndarray:
        keys = {
            kind: tuple(leaf[b, :, :anchor].swapaxes(0, 1) for leaf in leaves)
            for kind, *leaves in zip((SLIDING, FULL), read.k, read.v, strict=True)
        }
        block = tokens[b, np.minimum(anchor + np.arange(J), 11)].tolist()
        scores = reference(raw, tensors, keys, embedding, read.hidden[b, anchor - 1], block)
        teacher = 30 * np.tanh(read.hidden[b, anchor : anchor + J] @ output / 30)
        p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (teacher, scores))
        return (np.exp(p) * (p - q[: len(p)])).sum(-1)

    anchoring = Anchoring(anchors=2, decay=0.5)
    check_loss(target.model, target.params, head.config, head.params, anchoring, scored)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadConfig, Params]:
    """Return a folder with a `target`, its own answers and an assistant `hf` that learned them."""
    path, (target, _) = tmp_path_factory.mktemp("assistant"), pair(text=SHALLOW)
    save(path / "target", target.config, target.params, tokenizer=target.tokenizer)
    plain = engine(pair(text=SHALLOW), drafts=False)
    said = [plain.encoder.text(answer.tokens) for answer in plain.generate(requests())]
    turns = [((str(request.prompt), text),) for request, text in zip(requests(), said, strict=True)]
    recipe = HeadRecipe(
        target=str(path / "target"),
        head=HEAD,
        stages=(Stage("head", TRAIN, (("answers", 1.0),)),),
        anchoring=Anchoring(anchors=8),
        buckets=(64,),
        keep_readings=str(path / "readings"),
    )
    data = [Sample(str(i), "answers", (), turn) for i, turn in enumerate(turns)]
    config, params = train_head(recipe, path, {"answers": data})
    save_head(path / "hf", config, params, None)
    return path, config, params


@pytest.mark.full
def test_it_learns_to_draft(learned: tuple[Path, HeadConfig, Params]) -> None:
    """An assistant learns to draft from random weights: more of its drafts are accepted than of the
    untrained one's.
    """
    path, config, params = learned
    losses, target = training.losses(path / "head"), pair(text=SHALLOW)[0]
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    untrained = init_head(config, None, jax.random.key(0))
    few, many = (
        np.mean(
            [result.stats.tokens_per_pass for result in engine((target, head)).generate(requests())]
        )
        for head in (LoadedHead(config, untrained), LoadedHead(config, params))
    )
    assert many > few + 0.5


@pytest.mark.full
def test_transformers_reads_it(
    learned: tuple[Path, HeadConfig, Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers scores an exported assistant, of random keys and values, as this library
    does.
    """
    torch = pytest.importorskip("torch", reason="torch is the oracle: install the `parity` extra")
    from transformers import Gemma4AssistantForCausalLM, GenerationConfig

    from tests.tiny import hf

    hf.shares_all_layers(monkeypatch)
    path, _, params = learned
    export(path / "hf", path / "exported")
    assert GenerationConfig.from_pretrained(path / "exported").num_assistant_tokens == J
    model = Gemma4AssistantForCausalLM.from_pretrained(path / "exported")
    config, read = load_head(path / "exported", jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, read, params)
    config, rng, length = config.for_target(SHALLOW), np.random.default_rng(0), 9
    keys = {
        kind: rng.normal(size=(2, 1, layer.num_key_value_heads, length, layer.head_dim)).astype(
            "f4"
        )
        for kind, layer in ((SLIDING, SHALLOW.of_layer(0)), (FULL, SHALLOW.of_layer(1)))
    }
    token, state = rng.normal(size=(2, 1, 1, TEXT.hidden_size)).astype("f4")
    with torch.no_grad():
        theirs = model(
            inputs_embeds=torch.tensor(np.concatenate([token, state], -1)),
            position_ids=torch.tensor([[length]]),
            shared_kv_states={kind: tuple(torch.tensor(pair)) for kind, pair in keys.items()},
            use_cache=False,
        )
    here, text = jnp.full((1, 1), length), config.text_config
    at = Places(here, here, 0, jnp.ones((1, 1, 0), bool))
    rest = (), Reading(*zip(keys[SLIDING], keys[FULL], strict=True)), empty_room(text, 1, 0, "f4")
    hidden, after, _ = apply(module_of(config), read, token, state, at, *rest, method="step")
    scores = LanguageModel(text).logits(read, hidden)
    hf.assert_close(scores, theirs.logits.numpy())
    hf.assert_close(after, theirs.last_hidden_state.numpy())


def test_how_one_begins() -> None:
    """A new assistant begins at the target's sizes, or from a trained one, whose layers count."""
    config = new_head(TEXT, **HEAD, target_name="target")
    assert isinstance(config, AssistantConfig)
    assert config.text_config.layer_types == (SLIDING, SLIDING, FULL)
    assert config.key_layers == (2, 2, 3)
    smaller = new_head(TEXT, **{**HEAD, "layers": 1, "gamma": 2})
    trained = AssistantConfig.from_dict(smaller.to_dict())
    begun = config.started(trained, (), TEXT)
    assert begun == replace(smaller, gamma=J, target_name="target")
    assert begun.kept_options == {"layers": 1, "width": 32}
    with pytest.raises(InputError, match="scores all tokens; give --draft-vocabulary 0"):
        config.started(trained, (3, 4), TEXT)
    with pytest.raises(InputError, match="drafts for a Gemma 4, not for a llama"):
        new_head(tiny.CONFIG.text_config, **HEAD)


def test_groups_of_tokens_stay_as_they_are(tmp_path: Path) -> None:
    """Groups of tokens stay as they are in training, as of E2B's and E4B's assistants, which learn
    with the whole output matrix.
    """
    target, head = pair(groups=8, text=SHALLOW)
    save(tmp_path / "target", target.config, target.params, tokenizer=target.tokenizer)
    save_head(tmp_path / "start", head.config, head.params, None)
    recipe = HeadRecipe(
        target=str(tmp_path / "target"),
        head=HEAD,
        start=str(tmp_path / "start"),
        stages=(Stage("head", replace(TRAIN, steps=2), (("answers", 1.0),)),),
        anchoring=Anchoring(anchors=8),
        buckets=(64,),
    )
    data = [Sample("0", "answers", (), (("Hi", "What is this?"),))] * 4
    config, params = train_head(recipe, tmp_path, {"answers": data})
    assert replace(config, target_name="") == head.config
    jax.tree.map(
        np.testing.assert_array_equal, params["masked_embedding"], head.params["masked_embedding"]
    )
    weights = (one["pre_projection"]["weight"] for one in (params, head.params))
    assert (np.not_equal(*weights)).all()


def test_generation_settings_say_how_long_it_drafts(tmp_path: Path) -> None:
    """Generation settings say how long an assistant drafts if its config.json does not, as a
    published one's.
    """
    _, head = pair(text=SHALLOW)
    save_head(tmp_path / "head", head.config, head.params, None)
    raw = read_json(tmp_path / "head" / "config.json")
    del raw["jaxspec"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw))
    assert load_head(tmp_path / "head")[0].gamma == J
