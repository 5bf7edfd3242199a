"""Low-rank updates train alone, are written alone, and go on; only answers are scored."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.adapters import save_adapter
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.models.lora import LORA, Lora, init_lora, merged
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.draft_recipe import Recipe, adapter_base, start_draft, train_draft
from jaxspec.training.losses import agreement, count_blocks, metrics_of, next_token_loss
from jaxspec.training.objectives import GAMMA, encode, tuning_loss
from jaxspec.training.recipes import Stage
from tests import tiny
from tests.training.test_conversations import MODEL
from tests.training.test_goldens import STUDENT, batches
from train import recipe as script

UPDATES = Lora(rank=2, alpha=4, modules=("q_proj", "down_proj"))
TRAIN = TrainConfig(
    steps=2,
    batch=4,
    learning_rate=0.1,
    warmup=0,
    frozen=("vision_tower", "language_model"),
    mesh=MeshConfig(data=1),
)


def test_answers_alone_are_scored() -> None:
    """Scoring answers alone gives the loss, the gradient and the simulated tokens per pass of all
    scores.
    """
    batch = batches("M")(1)
    assert batch.answers is not None
    assert batch.answers.shape[1] < batch.mask.shape[1]
    step = jax.jit(jax.value_and_grad(tuning_loss(MODEL.model), has_aux=True))
    (loss, metrics), gradient = step(STUDENT, batch)

    def of_all_scores(params: Any) -> Any:
        logits = MODEL.model.score(params, batch.rows, encode(MODEL.model, params, batch.images))
        count = np.float32(batch.mask[:, 1:].sum())
        loss, sums = next_token_loss(logits, batch.tokens, batch.mask, count)
        blocks = count_blocks(agreement(logits, batch.tokens), batch.mask, GAMMA)
        return loss, metrics_of(sums | {"filled": batch.filled, "tokens_per_pass": blocks})

    (whole, expected), full = jax.jit(jax.value_and_grad(of_all_scores, has_aux=True))(STUDENT)
    assert float(loss) == pytest.approx(float(whole), rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-6
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, full)


def test_only_matrices_of_the_decoder_are_updated() -> None:
    for name in ("embed", "input_layernorm"):
        with pytest.raises(InputError, match=f"no matrix of the decoder is called {name!r}"):
            init_lora(Lora(modules=(name,)), STUDENT, jax.random.key(0))
    with pytest.raises(InputError, match="lora: no modules; give q_proj"):
        Lora(modules=())


@pytest.mark.full
def test_a_recipe_trains_the_updates_and_writes_an_adapter(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = taught / "target"
    made = Recipe(
        target=str(target),
        start=str(target),
        stages=(Stage("tune", TRAIN, (("talk", 1.0),)),),
        buckets=(128,),
        tile_buckets=(2,),
        lora=UPDATES,
    )
    start: Any = LoadedModel.load(target).params
    trained = train_draft(made, tmp_path / "runs", {"talk": taught / "talk"}).params
    for part in ("vision_tower", "language_model"):
        jax.tree.map(np.testing.assert_array_equal, trained[part], start[part])
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(trained[LORA]))
    monkeypatch.setattr(script, "load_preset", lambda *_: made)
    words = ["--data", f"talk={taught / 'talk'}", "--dtype", "float32"]
    words += ["--runs", str(tmp_path / "runs")]
    out = script.main(["mine", *words])
    adapted = LoadedModel.load(target, adapter=tmp_path / "runs" / "adapter").params
    whole = LoadedModel.load(out).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), adapted, whole)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, merged(trained, UPDATES)
    )


def test_training_goes_on_from_an_adapter_of_the_same_updates_only(
    taught: Path, tmp_path: Path
) -> None:
    """Training goes on only from an adapter of the same updates: its weights and its base's sign
    the run, and what is written belongs to that base.
    """
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(taught / "target", base)
    model = LoadedModel.load(base)
    zeros = init_lora(UPDATES, model.params, jax.random.key(0))

    def write(more: float) -> None:
        pairs = jax.tree.map(lambda leaf: leaf + more, zeros)
        params = {**model.params, LORA: pairs}
        save_adapter(adapter, model.config, params, UPDATES, str(base), "float32")

    write(0.1)
    made = Recipe(
        target=str(taught / "target"),
        start=str(adapter),
        stages=(Stage("tune", TRAIN, (("talk", 1.0),)),),
        buckets=(128,),
        tile_buckets=(2,),
        lora=UPDATES,
    )
    assert adapter_base(made) == str(base)
    assert adapter_base(replace(made, lora=replace(UPDATES, base="us/base"))) == "us/base"
    for change in ({"rank": 3}, {"alpha": 8}, {"modules": ("q_proj",)}):
        other = replace(made, lora=replace(UPDATES, **change))
        line = r"start .*: its adapter updates down_proj, q_proj at \(rank, scale\) \(2, 2.0\), but"
        with pytest.raises(InputError, match=line):
            start_draft(other, model)
    signed: list[dict[str, Any]] = []

    def sign(train: Any, params: Any, *_: Any, inputs: dict[str, Any], **more: Any) -> Any:
        signed.append(inputs)
        return params

    for change in (lambda: None, lambda: write(0.2), lambda: shutil.rmtree(base)):
        change()
        if not base.exists():
            tiny.save(base, model.config, jax.tree.map(lambda leaf: -leaf, model.params))
        draft = train_draft(made, tmp_path / "runs", {"talk": taught / "talk"}, sign)
        assert adapter_base(made) == str(base)
        assert draft.params[LORA].keys() == zeros.keys()
    first, second, third = signed
    assert first["start"] != second["start"] == third["start"]
    assert first["base"] == second["base"] != third["base"]


def test_an_adapter_keeps_its_bases_tokens(taught: Path, tmp_path: Path) -> None:
    """An adapter keeps its base's tokens: its file has neither embedding nor output matrix, so
    other tokens would be lost.
    """
    target = str(taught / "target")
    stages = (Stage("tune", TRAIN, (("talk", 1.0),)),)
    made = Recipe(target=target, start=target, stages=stages, buckets=(128,), lora=UPDATES)
    with pytest.raises(InputError, match="draft_vocabulary: 9 with lora, whose adapter"):
        replace(made, draft_vocabulary=9)
    text = replace(tiny.CONFIG.text_config, vocab_size=101)
    start = tiny.save(tmp_path / "start", text, tiny.random_params(text))
    for view in ("M", "T-slots"):
        line = f"start {start}: 101 tokens, and an adapter adds none of the target's 104"
        with pytest.raises(InputError, match=line):
            train_draft(
                replace(made, start=str(start), view=view), tmp_path, {"talk": taught / "talk"}
            )
