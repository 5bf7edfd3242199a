"""A compiled program's key holds all that changes the program: its placement and JAX's settings,
also where threads ask at once.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.engine import compile_cache
from jaxspec.engine.compile_cache import Held, executable
from jaxspec.sharding import make_mesh
from tests import tiny

NEW = 12
CONFIG = EngineConfig(views=("M", "T"), gamma=3)
REQUESTS = [Request("What?", NEW, images=[tiny.page()]), Request("Tell me", NEW, temperature=1.0)]


@pytest.fixture(scope="module")
def draft(target: LoadedModel) -> LoadedModel:
    return replace(target, params=jax.device_put(tiny.noisy(target.params, 0.1)))


def moved(model: LoadedModel, device: Any) -> LoadedModel:
    return replace(model, params=jax.device_put(model.params, device))


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return tiny.tokens(engine.generate(REQUESTS))


@pytest.mark.full
def test_one_process_holds_replicas(target: LoadedModel, draft: LoadedModel) -> None:
    """Engines on two devices of one process run the same programs and write the same tokens, with a
    draft and a head that were read onto the first.
    """
    first, second = (
        Engine(target, draft, CONFIG),
        Engine(moved(target, jax.devices()[1]), draft, CONFIG),
    )
    assert tokens(first) == tokens(second) == tokens(first)
    state = second.prefill(REQUESTS[:1])
    assert {leaf.device for leaf in jax.tree.leaves((state, second.assembly.params))} == {
        jax.devices()[1]
    }


@pytest.mark.full
def test_a_mesh_of_one_device_is_that_device(target: LoadedModel, draft: LoadedModel) -> None:
    """A mesh of one device writes that device's tokens, although its parameters are laid out by
    their rank and the draft's are not.
    """
    one = Engine(tiny.split(target, make_mesh()), draft, CONFIG)
    assert tokens(one) == tokens(Engine(target, draft, CONFIG))


def test_a_setting_that_changes_programs_compiles_them_anew(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: dict[Any, Any] = {}
    monkeypatch.setattr(compile_cache, "EXECUTABLES", compiled)
    setting = "jax_default_matmul_precision"
    before = jax.config.values[setting]
    try:
        for precision, programs in (("highest", 2), ("highest", 2), ("bfloat16", 4)):
            jax.config.update(setting, precision)
            Engine(target).generate("Hi")
            assert len(compiled) == programs
    finally:
        jax.config.update(setting, before)


@pytest.mark.full
def test_threads_that_ask_at_once_get_programs_of_their_own() -> None:
    """Threads that ask at once, and are switched often, get kinds of their own, one for each set of
    parameters.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        shapes = [{"kernel": jax.device_put(np.zeros((1, n), np.float32))} for n in range(1, 200)]
        with ThreadPoolExecutor(8) as pool:
            kinds = list(pool.map(lambda params: Held("program", None, params).kind, shapes))
    finally:
        sys.setswitchinterval(before)
    assert len(set(map(id, kinds))) == len(shapes)


class Step:
    """Count how often a program is compiled."""

    compiled = 0

    def lower(self, *_: Any) -> Step:
        return self

    def compile(self, **_: Any) -> str:
        for _ in range(10_000):  # the other threads come to run
            pass
        self.compiled += 1
        return "program"


@pytest.mark.parametrize("is_there", [True, False])
def test_threads_compile_one_program_once(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that need one program at once compile it once. One that is there stays there for the
    others too, although it becomes the newest.
    """
    monkeypatch.setattr(compile_cache, "EXECUTABLES", {})
    step, held, before = Step(), Held("program", None, {}), sys.getswitchinterval()
    if is_there:
        executable(step, held)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert {*pool.map(lambda _: executable(step, held), range(2000))} == {"program"}
    finally:
        sys.setswitchinterval(before)
    assert step.compiled == 1
