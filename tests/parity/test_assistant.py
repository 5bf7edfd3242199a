"""The numpy program of an assistant, and the files, are those of transformers.

A first block is compared: later ones of transformers keep the key of a rejected token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig
from transformers.cache_utils import DynamicCache

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import Gemma4TextConfig as Gemma4Text
from jaxspec.heads.blocks import keys_of
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.loading import load_head
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from tests.tiny import hf
from tests.tiny.assistant_reference import draft
from tests.tiny.hf import torch

pytestmark = pytest.mark.full

J, KINDS = 3, ("sliding_attention", "full_attention")


def assistant(monkeypatch: pytest.MonkeyPatch, groups: int) -> Gemma4AssistantForCausalLM:
    """Return an assistant of two sliding layers and a full one, with head sizes of its defaults."""
    hf.shares_all_layers(monkeypatch)
    layers = {"layer_types": [KINDS[0], KINDS[0], KINDS[1]], "hidden_size": 24, "vocab_size": 56}
    text = Gemma4TextConfig(**hf.GEMMA4 | layers | {"num_kv_shared_layers": 3})
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=32,
        use_ordered_embeddings=groups > 0,
        num_centroids=groups or 2048,
        centroid_intermediate_top_k=3,
    )
    model = hf.random_model(Gemma4AssistantForCausalLM, config)
    model.tie_weights()
    hf.soften(model.model.layers)
    if groups:
        order = torch.randperm(56, generator=torch.Generator().manual_seed(0))
        model.masked_embedding.token_ordering.copy_(order)
    return model


@pytest.mark.parametrize("changes", [hf.E2B, hf.E4B])
def test_the_keys_of_a_target_that_shares_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    target, row = hf.gemma4(**changes), hf.text(20)
    with torch.no_grad():
        out: Any = target(torch.tensor([row]), return_shared_kv_states=True)
    # As published files do, these hold keys of a layer that makes none.
    unread = "model.layers.9.self_attn.k_proj.weight"
    tensors = hf.hub_tensors(target) | {unread: np.ones((4, 32), np.float32)}
    lm = huggingface.load(hf.write(tmp_path / "target", target, tensors))
    model, text = LanguageModel(lm.config), lm.config
    assert isinstance(text, Gemma4Text)
    layers = replace(text, num_hidden_layers=2, layer_types=KINDS)
    config = AssistantConfig(layers, backbone_hidden_size=text.hidden_size).for_target(text)
    rows = PromptRows(jnp.asarray([row]), jnp.full(1, len(row)))
    embeds = model.embed(lm.params, rows, None)
    _, cache = jax.jit(model.read, static_argnums=3)(lm.params, embeds, rows, len(row))
    assert len(cache.k) == text.num_hidden_layers - changes["num_kv_shared_layers"]
    for *read, kind in zip(*keys_of(config, cache), KINDS, strict=True):
        for ours, theirs in zip(read, out.shared_kv_states[kind], strict=True):
            hf.assert_close(ours, theirs)


@pytest.mark.parametrize("groups", [0, 7])
def test_a_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """A first block of an assistant, in a row longer than the window, has transformers' tokens and
    scores.
    """
    target = hf.gemma4(vocab_size=56)
    row, cache = torch.tensor([hf.text(20)]), DynamicCache()
    layers: Any = cache.layers
    with torch.no_grad():
        out: Any = target(row, past_key_values=cache, output_hidden_states=True)
    shared = {kind: (layers[i].keys, layers[i].values) for kind, i in zip(KINDS, (0, 2))}
    model = assistant(monkeypatch, groups)
    state, token = out.hidden_states[-1][:, -1:], out.logits[:, -1:].argmax(-1)
    tokens, theirs = [int(token)], []
    for _ in range(J):
        with torch.no_grad():
            embeds = target.get_input_embeddings()(token)
            step: Any = model(
                inputs_embeds=torch.cat([embeds, state], -1),
                position_ids=torch.tensor([[row.shape[1]]]),
                shared_kv_states=shared,
                use_cache=False,
            )
        state, token = step.last_hidden_state, step.logits.argmax(-1)
        tokens.append(int(token))
        theirs.append(step.logits[0, 0].numpy())

    model.save_pretrained(tmp_path)
    config, params = load_head(tmp_path)
    embedding = target.get_input_embeddings().weight.detach().numpy() * 32**0.5
    keys: dict[str, Any] = {
        kind: tuple(leaf[0].numpy().swapaxes(0, 1) for leaf in leaves)
        for kind, leaves in shared.items()
    }
    first = out.hidden_states[-1][0, -1].numpy()
    ours = draft(config.to_dict(), named_tensors(params), keys, embedding, first, tokens[:J])
    scored = np.isfinite(ours)
    assert scored.sum(-1).tolist() == [24 if groups else 56] * J
    hf.assert_close(ours[scored], np.stack(theirs)[scored])
