"""What is planned for devices that are not there is what an engine holds on those that are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from configs.latency.llava7b_68m import config as LLAVA
from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.cache import whole_slots
from jaxspec.cli import main
from jaxspec.config import Gemma4TextConfig
from jaxspec.engine.memory import bytes_held
from jaxspec.engine.plan import abstract_program, estimate_decoding, sizes_of
from jaxspec.heads.loading import save_head
from jaxspec.heads.making import new_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.int8 import Weights
from jaxspec.models.lvlms.qwen_vl import QwenImages
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.conftest import ROOT
from tests.tiny.families import FAMILIES

PAGE = tiny.page(0, 20, 30)


@pytest.mark.parametrize(
    ("devices", "views", "options"),
    [
        (1, (), {}),
        (2, ("M", "T"), {"weights": "int8"}),
        *tiny.rarer(
            (2, (), {"feature": "fused", "target_layers": (0, 1, 2)}),
            (2, (), {"feature": "eagle1", "images": "unfused"}),
            (2, ("lookup",), {}),
        ),
    ],
)
def test_it_is_the_engines_own_report(
    pair: tuple[Path, Path], devices: int, views: tuple[str, ...], options: dict[str, Any]
) -> None:
    options = dict(options)
    weights: Weights | None = options.pop("weights", None)
    target = LoadedModel.load(pair[0], mesh=make_mesh(model=devices), weights=weights)
    drafts = [LoadedModel.load(pair[1])] if "M" in views else []
    if options:
        drafts = [tiny.head_of(target, **options)]
    config = EngineConfig(views=views, gamma=3, batch_size=2, image_buckets=(1,))
    engine = Engine(target, drafts, config)
    requests = [Request("Hi", 12, images=[PAGE])] * 2
    program, params = abstract_program(
        target.config, [draft.config for draft in drafts], config, jnp.float32, weights
    )
    sizes = engine.batcher.largest(engine.batcher.read(requests))
    found = estimate_decoding(
        program, params, devices, 2, sizes_of(program, sizes.length, 1, sizes.new)
    )
    assert found.memory == engine.memory_report(requests)
    assert (found.block > found.plain) == bool(engine.assembly.mixture.names)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_draft_holds_a_tower_of_its_own_if_it_is_another_one(layers: int) -> None:
    """A draft holds a tower of its own only if it differs from the target's, as Qwen3-VL-2B's next
    to the 8B.
    """
    target = tiny.CONFIG
    tower = replace(target.vision_config, num_hidden_layers=layers)
    program, params = abstract_program(
        target, [replace(target, vision_config=tower)], EngineConfig(gamma=3), jnp.float32
    )
    other = tower != target.vision_config
    assert program.sources[0].shares_tower is not other
    assert ("vision_tower" in params["draft"]) is other
    sizes = sizes_of(program, 64, 1, 16)
    assert sizes.tiles == (1, int(other))
    assert estimate_decoding(program, params, 2, 1, sizes).memory.draft_weights == bytes_held(
        params["draft"]
    )


def test_a_head_holds_no_second_copy_of_a_tied_targets_output_matrix(tmp_path: Path) -> None:
    """A head that scores by the output matrix of a tied target, its embedding, holds no copy."""
    config = replace(tiny.CONFIG.text_config, tie_word_embeddings=True)
    target = tiny.loaded(tiny.random_params(config), config)
    save_head(tmp_path / "head", *tiny.kv_head(target.model, target.params, feature="eagle1"), None)
    head, settings = LoadedHead.load(tmp_path / "head", target), EngineConfig(gamma=3)
    _, params = abstract_program(config, [head.config], settings, jnp.float32)
    report = Engine(target, head, settings).memory_report([Request("Hi", 12)])
    assert report.draft_weights == bytes_held(params["eagle1"])


def test_layers_that_read_the_keys_of_others_take_no_cache() -> None:
    """Layers that read the keys of others take no cache, as in Gemma 4 E2B: 2 of its 3 layers with
    keys slide, and have heads of half the width.
    """
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    text = Gemma4TextConfig(
        num_hidden_layers=6,
        layer_types=tuple(kinds),
        num_kv_shared_layers=3,
        num_key_value_heads=1,
        vocab_size=1000,
    )
    program, params = abstract_program(text, [], EngineConfig(), jnp.bfloat16, "int8")
    sizes = sizes_of(program, 64, 0, 16)
    found = estimate_decoding(program, params, 1, 2, sizes)
    slots = whole_slots(64 + 16 + program.spare_slots)
    counters = 2 * 2 * 4
    assert found.memory.target_cache == 2 * slots * 2 * 2 * (256 + 256 + 512) + counters
    model = params["target"]["model"]
    assert found.plain == found.memory.target_cache + bytes_held(
        {name: part for name, part in model.items() if name != "embed_tokens_per_layer"}
    )
    for name in ("per_layer_input_gate", "per_layer_projection"):
        assert model["layers_5"][name].keys() == {"weight", "scale"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chips", "h1000"], "--chips: unknown chip 'h1000'; did you mean 'h100'?"),
        (["--train", "8"], "--train: 8 samples teach one draft; give it by --draft"),
        (["--max-pixels", "784"], "--max-pixels: 'llava' does not size images by it; leave it out"),
        (["--views", "M"], "views: M need a draft model; give one, or leave them out"),
        (["--gamma", "3"], "--gamma: needs a draft; give --draft, or leave it out"),
        (["--draft-weights", "int8"], "--draft-weights: needs --draft; give one, or leave it out"),
        (["--train", "8", "--draft", "{}", "--gamma", "3"], "--gamma: a training step does not"),
        (["--train", "8", "--draft", "{}", "--batch-size", "2"], "--batch-size: a training step"),
        (["--draft", "{}", "--draft", "{}"], "draft: 2 models and 0 heads; give at most one of ea"),
    ],
)
def test_a_plan_of_what_nobody_has_is_refused(
    options: list[str], words: str, pair: tuple[Path, Path], refusal: Callable[..., str]
) -> None:
    assert words in refusal("plan", pair[0], *(option.format(pair[1]) for option in options))


def test_the_largest_plan_that_is_taken_ends(
    pair: tuple[Path, Path], said: Callable[..., str]
) -> None:
    most = ("--new", "--batch-size", "--gamma")
    sizes = [word for option in most for word in (option, 2**20)]
    asked = ("plan", pair[0], "--draft", pair[1], "--images", 4096, *sizes, "--chips", "v5e")
    assert re.search(r"^fits( +no){5}$", said(*asked), re.M)


def test_tiles_are_counted_of_a_number_of_pixels(tmp_path: Path, said: Callable[..., str]) -> None:
    """Images whose pixels are bounded are planned with the tiles of that bound, not of their full
    size.
    """
    config, processor = FAMILIES["qwen2_5_vl"]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert QwenImages(config, processor, 4096).tiles((900, 900)) == 16
    one, other = (
        said("plan", tmp_path, *options, "--chips", "v5e")
        for options in (["--images", 32], ["--images", 2, "--max-pixels", 4096])
    )
    assert one == other


def test_heads_of_the_hub_are_known_by_their_tensors(
    pair: tuple[Path, Path],
    tmp_path: Path,
    said: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of the hub are known to `plan` by their tensors, as when they are loaded: config.json
    may be a model's of one layer. A model's weights are not fetched.
    """
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    shutil.copytree(pair[0], hub / "some" / "target")
    target = LoadedModel.load(pair[0])
    config = new_head(target.config, feature="eagle1", images="zero")
    text = replace(config.text_config, own_embedding=True)
    config = replace(config, text_config=text)
    save_head(hub / "some" / "head", config, tiny.eagle_params(config, {}))
    raw = json.loads((hub / "some" / "head" / "config.json").read_text())
    raw |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (hub / "some" / "head" / "config.json").write_text(json.dumps(raw))

    def download(name: str, allow_patterns: list[str], **options: Any) -> str:
        (cache / name).mkdir(parents=True, exist_ok=True)
        for file in (hub / name).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copyfile(file, cache / name / file.name)
        return str(cache / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    names = (["plan", f"{at}some/target", "--draft", f"{at}some/head"] for at in ("", f"{hub}/"))
    tables = [said(*words, "--chips", "v5e").partition("\n")[2] for words in names]
    assert tables[0] == tables[1]
    assert [file.parent.name for file in cache.rglob("*.safetensors")] == ["head"]


def test_the_output_on_the_page_is_of_the_7bs_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")
    command, output = re.findall(r"```(?:sh)?\n(.*?)\n```", text, re.DOTALL)[:2]
    ids = {"llava-hf/llava-1.5-7b-hf": LLAVA.target, "mjbooo/lvlm68m": LLAVA.draft}
    for name, config in ids.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config.to_hf()))
    main([str(tmp_path / word) if word in ids else word for word in command.split()[1:]])
    assert output in "\n".join(map(str.rstrip, capsys.readouterr().out.splitlines()))
