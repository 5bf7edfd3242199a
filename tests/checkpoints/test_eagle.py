"""EAGLE-3 heads as files: both public layouts are read and written, and others' readings of them agree."""

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
from jaxspec.checkpoints.kv_head import is_kv_head, load_kv_head, save_kv_head
from jaxspec.cli import main
from jaxspec.config import KVHeadConfig, LlamaConfig
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel
from jaxspec.models.kv_head import KVHead, joined
from jaxspec.models.layers import apply
from jaxspec.typing import Params
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.tiny.eagle_reference import draft as reference

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


def made(words: tuple[int, ...] = WORDS, **options: Any) -> tuple[KVHeadConfig, Params]:
    config = KVHeadConfig.of_target(TEXT, feature="fused", target_name="owner/target", gamma=J)
    config = replace(config, text_config=replace(config.text_config, draft_vocabulary=words, **options))
    return config, tiny.eagle_params(config, TARGET)


def scores(config: KVHeadConfig, params: Params, states: np.ndarray, tokens: np.ndarray, anchor: int) -> np.ndarray:
    """Ours [J, V], of the block whose newest token is the anchor, in the forced tokens of the row."""
    own = joined(params, TARGET, config.text_config.draft_vocabulary)
    embeds = own["model"]["embed_tokens"]["embedding"][tokens][None]
    block = jnp.arange(J)[None, None] + anchor
    row = embeds[:, :-1], states[None], jnp.arange(len(states))[None]
    given = embeds[:, anchor + np.arange(J)][:, None], jnp.asarray([[anchor]]), block - 1, row

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def unroll(params: Params, own: Params) -> Any:
        out = apply(KVHead(config), params, *given, states[None, None, anchor - 1], method="unroll")
        return LanguageModel(config.text_config).logits(own, out)

    return np.asarray(unroll(params, own))[0, 0]


def row(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(3, 40, length + 1), rng.normal(size=(length, 3 * TEXT.hidden_size)).astype(np.float32)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vllm", {"words": (), "norm_before_residual": True}),
        ("sglang", {"norm_before_fc": True, "norm_output": True, "own_embedding": True}),
        ("speculators", {}),
    ],
)
def test_exports_are_read_bit_for_bit_and_score_alike(
    engine: str, options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, params = made(**options)
    save_kv_head(tmp_path / "head", config, params, None)
    main(["export", str(tmp_path / "head"), str(tmp_path / "out"), "--for", engine])
    command = {"vllm": '"method": "eagle3"', "sglang": "--speculative-algorithm EAGLE3", "speculators": "vllm serve "}
    assert command[engine] in capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = "layers.0." if engine == "speculators" else "midlayer."
    assert tensors[f"{layer}self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["t2d"].sum() == len(tensors["d2t"]) == len(config.text_config.draft_vocabulary) or 40
    found, read = load_kv_head(tmp_path / "out")
    first, again = load_kv_head(tmp_path / "head")
    assert found == first
    jax.tree.map(np.testing.assert_array_equal, read, again)
    main(["inspect", str(tmp_path / "out")])
    assert "EAGLE-3 head" in capsys.readouterr().out

    tokens, states = row()
    anchor = LENGTH - J
    names = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    theirs = reference(
        raw | raw.get("transformer_layer_config", {}),
        names,
        np.asarray(TARGET["model"]["embed_tokens"]["embedding"], np.float64),
        states[:anchor],
        tokens[: anchor + 1],
        np.repeat(np.arange(anchor)[:, None], 3, axis=1),
        tokens[anchor + 1 : anchor + J],
    )
    np.testing.assert_allclose(scores(found, read, states, tokens, anchor), theirs, atol=1e-4)


def test_speculators_own_class_gives_our_scores(tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators.models.eagle3", reason="speculators is not installed")
    torch = pytest.importorskip("torch")
    tiny.save(tmp_path / "target", TEXT, TARGET)
    config, params = made(norm_before_residual=True)
    save_kv_head(tmp_path / "head", config, params, None)
    places = [str(tmp_path / name) for name in ("head", "out", "target")]
    main(["export", *places[:2], "--for", "speculators", "--vocab-of", places[2]])
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"name_or_path": "target"', f'"name_or_path": "{tmp_path / "target"}"'))
    model = speculators.Eagle3DraftModel.from_pretrained(tmp_path / "out").eval()
    embedding = np.asarray(TARGET["model"]["embed_tokens"]["embedding"])
    model.embed_tokens.weight.data = torch.tensor(embedding)  # which the files leave out, and memory may hold anything
    tokens, states = row(128)  # of as many tokens as a block of its attention mask has
    told: list[Any] = []
    model.lm_head.register_forward_hook(lambda _, __, out: told.append(out.detach().numpy()[0]))
    one = torch.zeros((1, 128), dtype=torch.long)
    with torch.no_grad():
        model(torch.tensor(states[None]), torch.tensor(tokens[None, 1:]), one, ttt_steps=J)
    words, anchor = np.arange(len(WORDS)) + model.d2t.numpy(), 90
    theirs = np.stack([step[anchor - 1] for step in told])
    ours = scores(config, params, states, tokens, anchor)
    assert np.isneginf(ours).sum() == J * (TEXT.vocab_size - len(words))
    np.testing.assert_allclose(ours[:, words], theirs, atol=1e-4)


def test_what_this_library_lacks_is_named(tmp_path: Path) -> None:
    save_kv_head(tmp_path / "head", *made(), None)
    assert is_kv_head(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    raw = json.loads(file.read_text())
    for entries, told in (
        ({"fc_norm": True}, r"config.json has \['fc_norm'\], which is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "'use_aux_hidden_state false'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8|quantization_config"),
    ):
        file.write_text(json.dumps(raw | entries))
        with pytest.raises(InputError, match=told):
            load_kv_head(tmp_path / "head")
    file.write_text(json.dumps(raw | {"logit_scale": 1.0, "fc_norm": False}))
    load_kv_head(tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "d2t"}, tmp_path / "head/model.safetensors")
    with pytest.raises(InputError, match="the files lack d2t"):
        load_kv_head(tmp_path / "head")
