"""An MTP head in its target's own files drafts what the published layer computes, and is written by
itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import Engine, EngineConfig, LoadedModel, Request, load_draft
from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.cli import main
from jaxspec.config import MimoConfig
from jaxspec.errors import InputError
from jaxspec.heads.kinds import mtp
from jaxspec.heads.kinds.mtp import MtpConfig
from jaxspec.heads.loading import holds_head, list_head, load_head, save_head
from jaxspec.heads.making import init_head
from jaxspec.loading.models import LoadedHead
from jaxspec.prompts.encoder import Prompt
from tests import tiny
from tests.tiny.files import read_json
from tests.tiny.one_pass import check_draft, drafted_blocks

J, BLOCKS = 3, 6
TEXT = MimoConfig(
    vocab_size=tiny.CONFIG.text_config.vocab_size,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
ENGINE = EngineConfig(gamma=J, batch_size=1, new_buckets=(32,), prompt_buckets=(64,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target in two shards, of which the second holds its head, as MiMo's files do."""
    path, params = tmp_path_factory.mktemp("mimo") / "mimo", tiny.random_params(TEXT)
    tiny.save(path, TEXT, params, tiny.chat_tokenizer())
    config = MtpConfig.of_target(TEXT)
    _, head = mtp.KIND.written(config, named_tensors(tiny.eagle_params(config, params)), "vllm", ())
    decoder = load_file(path / "model.safetensors")
    shards = {"model-1-of-2.safetensors": decoder, "model-2-of-2.safetensors": dict(head)}
    (path / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file({key: np.asarray(leaf) for key, leaf in tensors.items()}, path / name)
    weights = {key: name for name, tensors in shards.items() for key in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    raw = read_json(path / "config.json")
    (path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    return path


@pytest.fixture(scope="module")
def target(directory: Path) -> LoadedModel:
    return LoadedModel.load(directory)


@pytest.fixture(scope="module")
def head(directory: Path, target: LoadedModel) -> LoadedHead:
    draft = load_draft(directory, target)
    assert isinstance(draft, LoadedHead)
    return draft


def test_blocks_are_drafted_as_the_published_layer_says(
    directory: Path, target: LoadedModel, head: LoadedHead
) -> None:
    """An MTP head's blocks are drafted as the published layer computes them: PyTorch runs the
    target and, with transformers' Qwen2 layers, its head, from the files.
    """
    torch = pytest.importorskip("torch", reason="torch is the oracle: install the `parity` extra")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tensors = {
        key: torch.tensor(leaf)
        for file in directory.glob("*.safetensors")
        for key, leaf in load_file(file).items()
    }
    raw = read_json(directory / "config.json")
    sizes = Qwen2Config(
        **{key: raw[key] for key in raw if key not in ("model_type", "layer_types")}
    )
    model = Qwen2ForCausalLM(sizes).eval()
    model.load_state_dict(tensors, strict=False)
    prefix = "model.mtp_layers.0."
    own = {key.removeprefix(prefix): leaf for key, leaf in tensors.items() if prefix in key}
    layer = type(model.model.layers[0])(sizes, 0).eval()
    layer.load_state_dict({key: own[key] for key in layer.state_dict()})

    def normed(name: str, x: Any) -> Any:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + sizes.rms_norm_eps)
        return x * own[f"{name}.weight"]

    def scores(tokens: list[int], drafted: list[int]) -> np.ndarray:
        states = []
        hook = model.model.layers[-1].register_forward_hook(
            lambda *args: states.append(args[2][0] if isinstance(args[2], tuple) else args[2])
        )
        model(torch.tensor([tokens[:-1]]))
        hook.remove()
        before = states[0].reshape(-1, sizes.hidden_size)
        row, out = tokens[1:], []
        for token in (None, *drafted):
            row = row if token is None else [*row, token]
            embeds = model.model.embed_tokens(torch.tensor(row)).clone()
            embeds[0] = 0
            joined = torch.cat(
                [normed("hidden_layernorm", before), normed("token_layernorm", embeds)], -1
            )
            x = (joined @ own["input_proj.weight"].T)[None]
            places = torch.arange(len(row))[None]
            mask = torch.full((1, 1, len(row), len(row)), -torch.inf).triu(1)
            angles = model.model.rotary_emb(x, places)
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
            x = normed(
                "final_layernorm", (x[0] if isinstance(x, tuple) else x).reshape(len(row), -1)
            )
            out.append((x[-1] @ model.lm_head.weight.T).detach().numpy())
            before = torch.cat([before, x[-1:]])
        return np.stack(out)

    engine = Engine(target, head, ENGINE)
    # Only the first token behind a prompt of one token has no embedding there.
    for prompt in engine.encoder.prompt("What is this?", []), Prompt(np.asarray([5], np.int32)):
        request = Request(prompt, BLOCKS * (J + 1), temperature=2.0, seed=3)
        for answer, draft in drafted_blocks(engine, request, BLOCKS):
            drafted = np.asarray(draft.tokens)[0].tolist()
            with torch.no_grad():
                logits = scores([*prompt.tokens.tolist(), *answer], drafted[:-1])
            check_draft(draft, logits, 2.0, atol=2e-5)


def test_it_begins_as_its_targets_last_layer_and_norm(target: LoadedModel) -> None:
    """The target's own tensors of an MTP head, which its files hold, are not among its weights."""
    assert not any("mtp" in key for key in named_tensors(target.params))
    head = init_head(MtpConfig.of_target(TEXT), target.params, jax.random.key(0))
    model = target.params["model"]
    jax.tree.map(
        np.testing.assert_array_equal,
        {"norm": head["norm"], "layer": head["layers_0"]},
        {"norm": model["norm"], "layer": model[f"layers_{TEXT.num_hidden_layers - 1}"]},
    )


def test_it_is_written_by_itself(directory: Path, tmp_path: Path, target: LoadedModel) -> None:
    main(["export", str(directory), str(tmp_path / "model")])  # the model, without its head
    assert not any("mtp" in key for key in load_file(tmp_path / "model" / "model.safetensors"))
    assert "num_nextn_predict_layers" not in read_json(tmp_path / "model" / "config.json")
    assert not holds_head(tmp_path / "model")
    config, params = load_head(directory)
    save_head(tmp_path / "head", config, params, None)
    again, read = load_head(tmp_path / "head")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, read)
    with pytest.raises(
        InputError, match=r"made for a target of width 32 and .* and 3 layers, and no"
    ):
        config.for_target(tiny.CONFIG)


def test_other_numbers_of_layers_are_refused(directory: Path, tmp_path: Path) -> None:
    raw = read_json(directory / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 2}))
    with pytest.raises(InputError, match="num_nextn_predict_layers 2; give 1"):
        list_head(tmp_path)
