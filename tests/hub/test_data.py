"""Evaluation sets come from the hub's local cache where there is no network, and missing or broken
files are named.
"""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest

from eval.lib.questions.sets import evaluation_set
from jaxspec.data.benchmarks import BENCHMARKS, benchmark_samples, few_shot_samples
from jaxspec.data.hub import on_disk
from jaxspec.data.rows import local_rows
from jaxspec.errors import InputError
from tests.hub import build
from tests.hub.conftest import cached_at
from tests.hub.data import DATA, write

pytest.importorskip("pyarrow", reason="parquet needs pyarrow: install the `benchmarks` extra")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_set_is_read_offline(name: str) -> None:
    known = BENCHMARKS[name]
    samples = list(benchmark_samples(name))
    part = DATA[known.hub].parts[known.config, known.split]
    assert len(samples) == (3 if known.only else part.rows * part.shards)
    assert all(bool(sample.images) == bool(known.images) for sample in samples)
    assert all(image.load().mode == "RGB" for sample in samples for image in sample.images)
    assert len({image.content for sample in samples for image in sample.images}) in (
        0,
        *range(2, 99),
    )
    if known.shots:
        assert "Answer:" in next(few_shot_samples(name)).turns[0][0]


def test_second_turns_come_from_the_cache_too() -> None:
    (sample,) = evaluation_set("pope", 1, turns=2, kinds=("fact",))
    assert sample.turns[1][0].startswith("Who wrote it. Provide a comprehensive")


def test_files_of_a_set_are_found_by_their_names() -> None:
    assert (
        len(list(local_rows(on_disk(Path("hub:togethercomputer/RedPajama-Data-1T-Sample"))))) == 11
    )
    assert len(list(local_rows(on_disk(Path("hub:laion/OIG/unified_chip2.jsonl"))))) == 3


def test_a_set_is_read_at_a_revision() -> None:
    file = on_disk(Path("hub:laion/OIG/unified_chip2.jsonl"))
    revision = file.parent.name
    assert on_disk(Path(f"hub:laion/OIG@{revision}/unified_chip2.jsonl")) == file
    with pytest.raises(InputError, match=r"--repo-type dataset --revision 0123abc\)"):
        on_disk(Path("hub:laion/OIG@0123abc/unified_chip2.jsonl"))
    pope = on_disk(Path("hub:lmms-lab/POPE"))
    pinned = Path(f"hub:lmms-lab/POPE@{pope.name}")
    assert list(benchmark_samples("pope", pinned)) == list(benchmark_samples("pope", pope))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("laion/OIGG/unified_chip2.jsonl", "cannot be fetched from the hub"),
        ("laion/OIG/unified_chip3.jsonl", "there is no such file"),
        ("laion", "cannot be fetched from the hub"),
    ],
)
def test_what_a_set_has_not_is_told(place: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as told:
        on_disk(Path(f"hub:{place}"))
    assert "\n" not in str(told.value)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache that holds only POPE, in three files."""
    build.add(
        tmp_path, "lmms-lab/POPE", lambda folder: write(folder, DATA["lmms-lab/POPE"]), "datasets"
    )
    with cached_at(tmp_path):
        yield tmp_path


def test_the_parquet_copy_gives_the_same_rows_and_comes_first(cache: Path) -> None:
    known = list(benchmark_samples("pope"))
    (snapshot,) = cache.glob("datasets--*/snapshots/*")

    def copy(folder: Path) -> None:
        (folder / "default" / "test").mkdir(parents=True)
        for number, file in enumerate(sorted((snapshot / "data").iterdir())):
            shutil.copy(file, folder / "default" / "test" / f"{number:04d}.parquet")

    build.add(cache, "lmms-lab/POPE", copy, "datasets", "refs/convert/parquet")
    (snapshot / "README.md").unlink()
    again = list(benchmark_samples("pope"))
    assert [sample.turns for sample in again] == [sample.turns for sample in known]
    assert [sample.images[0].content for sample in again] == [
        sample.images[0].content for sample in known
    ]


def refused(name: str = "pope", count: int = 9) -> str:
    with pytest.raises(InputError) as told:
        list(islice(benchmark_samples(name), count))
    assert "\n" not in str(told.value)
    return str(told.value)


def test_what_is_not_there_is_told_with_the_command_that_fetches_it(cache: Path) -> None:
    assert "hf download lmms-lab/MMVet --repo-type dataset" in refused("mm-vet")
    (shard,) = cache.glob("datasets--*/snapshots/*/data/test-00001-*")
    shard.unlink()
    assert "the hub's cache holds 2 of the 3 files test-*-of-00003.parquet" in refused()


@pytest.mark.parametrize("card", ["", "---\nconfigs: {a\n---\n"])
def test_a_card_that_names_no_files_is_told(cache: Path, card: str) -> None:
    (place,) = cache.glob("datasets--*/snapshots/*/README.md")
    place.unlink()
    place.write_text(card)
    assert "names no files of this split" in refused()


def test_a_card_leads_nowhere_else(cache: Path) -> None:
    (place,) = cache.glob("datasets--*/snapshots/*/README.md")
    place.unlink()
    told = "[{config_name: default, data_files: [{split: test, path: [%s]}]}]"
    outside = ", ".join(("../*/data/test-*", "/data/test-*", "data/../../x"))
    place.write_text(f"---\nconfigs: {told % outside}\n---\n")
    assert "config default, split test: cannot be read" in refused()
