"""A KV head's life with a tiled target: this writes answers, the head learns from them, and drafts what was scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from eval.lib.simulation import count_blocks, head_agreement
from jaxspec.checkpoints import huggingface
from jaxspec.config import LlavaNextConfig
from jaxspec.data.samples import Sample
from jaxspec.data.sources import prepare
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.loading import LoadedHead
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.kv_head import Anchoring, HeadRecipe, train_kv_head
from jaxspec.training.recipes import Stage
from jaxspec.training.regenerate import Regeneration, regenerate, regenerated
from transformers import LlavaNextImageProcessorPil

from tests import tiny
from tests.tiny import Talk

PINPOINTS = [[28, 56], [56, 28], [56, 56]]
NEW, J = 24, 3
ENGINE: dict[str, Any] = {
    "batch_size": 4, "prompt_buckets": (96,), "image_buckets": (6,), "new_buckets": (NEW,), "gamma": J
}  # fmt: skip


class Asked(Talk):
    """The first turns alone."""

    def __getitem__(self, i: Any) -> Sample:
        sample = super().__getitem__(i)
        return replace(sample, turns=sample.turns[:1])


def save_tiled(path: Path) -> Path:
    """A LLaVA-NeXT of one layer, which a head begins as; a tenth of all tokens end an answer."""
    text = replace(tiny.CONFIG.text_config, num_hidden_layers=1, eos_token_id=tuple(range(5, 15)))
    config = LlavaNextConfig(
        text,
        tiny.CONFIG.vision_config,
        image_token_index=tiny.CONFIG.image_token_index,
        image_grid_pinpoints=tuple((y, x) for y, x in PINPOINTS),
    )
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
    )
    params = tiny.random_params(config)
    huggingface.save(path, config, params, tokenizer=tiny.tokenizer(), image_processor=processor)
    return path


def test_a_head_of_a_tiled_target_learns_from_its_answers_and_drafts_as_scored(tmp_path: Path) -> None:
    path = save_tiled(tmp_path / "target")
    target = LoadedModel.load(path, jnp.dtype("float32"))
    plain = Engine(target, None, EngineConfig(**ENGINE))
    work = Regeneration("tiny", "talk", samples=4, temperature=0.0, max_new_tokens=NEW, chunk=4)
    regenerate(plain, Asked(), work, tmp_path / "answers")
    answers = prepare("talk_t0", tmp_path, regenerated(Asked(), work, tmp_path / "answers"))

    train = TrainConfig(steps=2, batch=4, learning_rate=1e-3, warmup=1, log_every=1, mesh=MeshConfig(data=1))
    recipe = HeadRecipe(
        target=str(path),
        head={"pooling": "attention", "image_tokens": 12, "image_slots": 3, "feature": "last_hidden", "gamma": J},
        stages=(Stage("kv_head", train, (("talk_t0", 1.0),)),),
        anchoring=Anchoring(anchors=4),
        buckets=(160,),
        tile_buckets=(6,),
    )
    config, params = train_kv_head(recipe, tmp_path, {"talk_t0": answers})
    with pytest.raises(InputError, match=r"anchoring\.loss 'kl', and now it is 'ce'"):
        train_kv_head(replace(recipe, anchoring=Anchoring(4, loss="ce")), tmp_path, {"talk_t0": answers})

    head = LoadedHead(config, params)
    fast = Engine(replace(target, head=head), None, EngineConfig(views=("kv",), **ENGINE))
    requests = [Request(plain.encoder.prompt(s.turns[0][0], s.images), NEW) for s in map(Asked().__getitem__, range(4))]
    accepted = 0
    for request, drafted, answer in zip(requests, fast.generate(requests), plain.generate(requests), strict=True):
        assert drafted.tokens == answer.tokens
        blocks = count_blocks(head_agreement(target, head, request.prompt, answer.tokens, J), J)
        assert blocks == (drafted.stats.steps, drafted.stats.emitted)
        accepted += int(drafted.stats.accepted_at.sum())
    assert accepted > 0
