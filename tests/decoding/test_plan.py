"""What is planned for devices that are not there is what an engine holds on those that are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.cli import main
from jaxspec.config import LlamaConfig, LlavaConfig
from jaxspec.decoding.memory import bytes_held
from jaxspec.decoding.plan import abstract_program, plan, read_by_pass, sizes_of, usual_head
from jaxspec.loading import LoadedHead
from jaxspec.models.int8 import Weights
from jaxspec.sharding import make_mesh

from tests import tiny

LLAVA_7B = LlavaConfig(LlamaConfig(vocab_size=32064))
PAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def test_a_usual_head_has_no_more_slots_than_an_image_has_tokens(pair: tuple[Path, Path]) -> None:
    target: Any = LoadedModel.load(pair[0]).config
    assert usual_head(target).image_slots == target.image_tokens < 64


@pytest.mark.parametrize(
    ("devices", "views", "options"),
    [
        (1, (), {}),
        (2, ("M", "T"), {}),
        (2, ("kv",), {}),
        (2, ("kv",), {"feature": "fused", "target_layers": (0, 1, 2)}),
        (2, ("lookup",), {}),
        (2, ("M", "T"), {"weights": "int8"}),
    ],
)
def test_it_is_the_engines_own_report(
    pair: tuple[Path, Path], devices: int, views: tuple[str, ...], options: dict[str, Any]
) -> None:
    options = dict(options)
    weights: Weights | None = options.pop("weights", None)
    target = LoadedModel.load(pair[0], mesh=make_mesh(model=devices), weights=weights)
    draft = LoadedModel.load(pair[1])
    head = None
    if "kv" in views:
        head = LoadedHead(*tiny.kv_head(target.model, target.params, **options))
        target = replace(target, head=head)
    config = EngineConfig(views=views, gamma=3, batch_size=2, image_buckets=(1,))
    engine = Engine(target, draft if "M" in views else None, config)
    requests = [Request("Hi", 12, images=[PAGE])] * 2
    program, params = abstract_program(
        target.config, draft.config, views, 3, jnp.float32, head=head and head.config, weights=weights
    )
    sizes = engine.batcher.largest(engine.batcher.read(requests))
    found = plan(program, params, devices, 2, sizes_of(program, sizes.length, 1, sizes.new))
    assert found.memory == engine.memory_report(requests)
    assert (found.block > found.plain) == bool(views)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_draft_holds_a_tower_of_its_own_if_it_is_another_one(layers: int) -> None:
    """As Qwen3-VL-2B next to the 8B."""
    target = tiny.CONFIG
    tower = replace(target.vision_config, num_hidden_layers=layers)
    program, params = abstract_program(target, replace(target, vision_config=tower), ("M",), 3, jnp.float32)
    other = tower != target.vision_config
    assert program.shares_tower is not other
    assert ("vision_tower" in params["drafter"]) is other
    sizes = sizes_of(program, 64, 1, 16)
    assert sizes.tiles == (1, int(other))
    assert plan(program, params, 2, 1, sizes).memory.draft_weights == bytes_held(params["drafter"])


def test_int8_halves_what_a_pass_reads() -> None:
    """LLaVA-1.5-7B keeps embedding, head and tower in 16 bits: 1.1 of its 13.2 GiB."""
    sixteen, eight = (
        abstract_program(LLAVA_7B, None, (), 3, jnp.bfloat16, weights=weights)[1]["target"]
        for weights in (None, "int8")
    )
    assert 0.53 < bytes_held(eight) / bytes_held(sixteen) < 0.55
    assert 0.50 < bytes_held(read_by_pass(eight)) / bytes_held(read_by_pass(sixteen)) < 0.52


def test_the_command_tells_which_devices_hold_a_target(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each quantity, which eighty columns hold, and a column for each number of devices."""
    monkeypatch.setattr("jaxspec.cli.plan.ROOM", 3e-4)
    main(["plan", str(pair[0]), "--draft", str(pair[1]), "--views", "m, T", "--chips", "v3", "h100"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines()[1:])) <= 80
    assert re.findall(r"^(v3|h100), (\d+) GiB +1(?: +2 +4 +8 +16)?$", told, re.M) == [("v3", "16"), ("h100", "80")]
    assert re.findall(r"^fits +(.+)$", told, re.M)[1] == "yes"
    assert len(re.findall(r"^(weights|caches|together), GiB +[\d.]+|^(speed-up at 2) +[\d.]+", told, re.M)) == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chips", "h1000"], "--chips: unknown chip 'h1000'; did you mean 'h100'?"),
        (["--train", "8"], "--train: 8 samples teach a draft; give --draft"),
        (["--train", "8", "--draft", "{}", "--kv-head", "new"], "8 samples teach a draft; give --draft, no --kv-head"),
        (["--train", "8", "--draft", "{}", "--target-weights", "int8"], "--target-weights: training reads no int8"),
        (["--views", "kv", "--draft", "{}"], "--views: kv: view kv needs a KV head; give --kv-head"),
        (["--views", "M"], "--views: M: M needs a draft; give --draft"),
        (["--kv-head", "{}"], "is not the directory of a KV head"),
    ],
)
def test_a_plan_of_what_nobody_has_is_refused(
    options: list[str], words: str, pair: tuple[Path, Path], refusal: Callable[..., str]
) -> None:
    assert words in refusal("plan", pair[0], *(option.format(pair[1]) for option in options))


def test_the_largest_plan_that_is_taken_ends(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    most = ("--new", "--batch-size", "--gamma")
    sizes = [word for option in most for word in (option, str(2**20))]
    main(["plan", str(pair[0]), "--draft", str(pair[1]), "--images", "4096", *sizes, "--chips", "v5e"])
    assert re.search(r"^fits( +no){5}$", capsys.readouterr().out, re.M)
