"""All tests run in full float32 on eight virtual CPU devices, or on the platform JAX_PLATFORMS
names.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import jax
import pytest

if TYPE_CHECKING:
    from jaxspec.loading.models import LoadedModel

ROOT = Path(__file__).resolve().parents[1]
MOST_RESIDENT = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5
"""Bytes of memory from which a worker releases its programs."""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "picturebook" / "README.md",
    *(ROOT / "results" / name for name in ("claims.md", "mmspec_recorded/README.md")),
]
"""What users read. Results' list and the changes are histories, and not among them."""


def page_name(page: Path) -> str:
    """Return a page's path in the repository, as `docs/python.md`."""
    return page.relative_to(ROOT).as_posix()


# Must come before the first import of jaxspec.
if os.environ.get("JAXSPEC_SHAPES"):
    from tests import shapes

    shapes.install()

# Through the environment, so that the processes that tests start inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# Frames of Python that a program's operations name: pytest's are many, and written for each.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
# Most of the suite's time is compilation of programs that run for milliseconds. Split into parts
# for threads, they take longer in all, and the workers of the suite use all cores anyway. Newer
# versions of XLA do not know the last flag, and end the process at a flag that they do not know.
_QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join((*_QUICK, os.environ.get("XLA_FLAGS", "")))

# And here, because jax read its environment when it was imported.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update(
    "jax_persistent_cache_min_compile_time_secs",
    float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]),
)
jax.config.update(
    "jax_traceback_in_locations_limit", int(os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"])
)
jax.config.update("jax_default_matmul_precision", "highest")
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)

# A compilation inside an example takes seconds, so no deadline; CI draws the same examples every
# time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


COMPILED: Counter[str] = Counter()
"""Seconds of compilation by test. The workers send theirs with their reports."""
_UNREPORTED: list[float] = []


def _add_compilation(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _UNREPORTED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_add_compilation)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    item.user_properties.append(("compiled", sum(_UNREPORTED)))
    _UNREPORTED.clear()
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        COMPILED[report.nodeid] += sum(seconds for _, seconds in report.user_properties)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the thirty tests that compile longest."""
    terminalreporter.section(f"compilation: {COMPILED.total():.0f} s in all")
    for test, seconds in COMPILED.most_common(30):
        if seconds > 1:
            terminalreporter.write_line(f"{seconds:6.1f} s {test}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `data` last. A worker takes whole files, and those take seconds, so that no
    worker waits long for the other's last file.
    """
    items.sort(key=lambda item: item.path.parent.name == "data")


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections, and collect more seldom: traces make
    millions of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _bounded_programs() -> Iterator[None]:
    """Release compiled programs where there are many: each maps memory, and Linux ends a process
    with 65,530 maps. A worker that keeps all grows to 6 GB.
    """
    from jaxspec.engine import compile_cache

    yield
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if maps.exists():
        resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if maps.read_bytes().count(b"\n") < 30_000 and resident < MOST_RESIDENT:
            return
    compile_cache.EXECUTABLES.clear()
    jax.clear_caches()
    gc.collect()
    with suppress(AttributeError):  # of glibc, which keeps what is freed
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def _no_timings() -> None:
    """Time one pass only, since times mean nothing in tests."""
    from eval.lib.times import passes

    passes.CALL_MS = 0.0


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directories of a tiny target and of a draft that looks through its tower; a KV
    head `head` is next to them.
    """
    from tests import tiny

    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    """Return the target that engines of tests decode with."""
    from tests import tiny

    return tiny.loaded(tiny.random_params(tiny.CONFIG))


@pytest.fixture(scope="session")
def draft(target: LoadedModel) -> LoadedModel:
    """Return a draft that looks through the target's tower."""
    from tests import tiny

    tower = {"vision_tower": target.params["vision_tower"]}
    return tiny.loaded(tiny.noisy(target.params, 0.1) | tower)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call `jaxspec WORD ...`; return what it prints."""
    from jaxspec.cli import main

    def call(*words: object) -> str:
        capsys.readouterr()
        main([*map(str, words)])
        return capsys.readouterr().out

    return call


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call `jaxspec WORD ...`, which must be refused; return the one line that it says."""
    from jaxspec.cli import main

    def refuse(*words: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*map(str, words)])
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, "")
        assert err.startswith("jaxspec: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err

    return refuse


@pytest.fixture
def tiny_preset(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put a preset of the tiny pair in the place of every preset of eval/; return it."""
    from eval.lib.drafts.config import EvalConfig

    def put(**fields: Any) -> EvalConfig:
        sizes: dict[str, Any] = {
            "max_new_tokens": 8,
            "prompt_buckets": (384,),
            "image_buckets": (1,),
        }
        preset = EvalConfig(target=str(pair[0]), draft=(str(pair[1]),), **sizes | fields)
        monkeypatch.setattr("eval.lib.drafts.command_line.load_preset", lambda kind, name: preset)
        return preset

    return put
