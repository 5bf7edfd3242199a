"""What is planned for devices that are not there is what an engine holds on those that are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.cli import main
from jaxspec.decoding.plan import abstract_program, plan, sizes_of, usual_head
from jaxspec.loading import LoadedHead
from jaxspec.sharding import make_mesh

from tests import tiny

PAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


def test_a_usual_head_has_no_more_slots_than_an_image_has_tokens(pair: tuple[Path, Path]) -> None:
    target: Any = LoadedModel.load(pair[0]).config
    assert usual_head(target).image_slots == target.image_tokens < 64


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("views", [(), ("M", "T"), ("kv",)])
def test_it_is_the_engines_own_report(pair: tuple[Path, Path], devices: int, views: tuple[str, ...]) -> None:
    target, draft = LoadedModel.load(pair[0], mesh=make_mesh(model=devices)), LoadedModel.load(pair[1])
    head = None
    if "kv" in views:
        head = LoadedHead(*tiny.kv_head(target.model, target.params))
        target = replace(target, head=head)
    config = EngineConfig(views=views or ("M",), gamma=3, batch_size=2, image_buckets=(1,))
    engine = Engine(target, draft if "M" in views else None, config)
    requests = [Request("Hi", 12, images=[PAGE])] * 2
    program, params = abstract_program(target.config, draft.config, views, 3, jnp.float32, head=head and head.config)
    sizes = engine._largest(engine._read(requests))
    found = plan(program, params, devices, 2, sizes_of(program, sizes.length, 1, sizes.new))
    assert found.memory == engine.memory_report(requests)
    assert (found.block > found.plain) == bool(views)


def test_the_command_tells_which_devices_hold_a_target(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    main(["plan", str(pair[0]), "--draft", str(pair[1]), "--views", "M,T", "--chips", "h100"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "1 h100" in line)
    assert [cell.strip() for cell in line.split("│")][6:8] == ["80 GiB", "yes"]
    with pytest.raises(SystemExit):
        main(["plan", str(pair[0]), "--chips", "h1000"])
    assert "chips: 'h1000' is none that is known; did you mean 'h100'?" in capsys.readouterr().err
