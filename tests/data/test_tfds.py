"""TFDS data sets, those prepared for training and a stranger's, are read as evaluation sets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from eval.lib.questions.sets import evaluation_set
from jaxspec.data.conversations import Skipped, readable
from jaxspec.data.prepared import FileFormat, Prepared, prepare
from jaxspec.data.tfds_records import images_of, tfds_records
from jaxspec.errors import InputError
from picturebook.training import Picturebook


class HardSums(tfds.core.GeneratorBasedBuilder):
    """Hold GSM8K's columns in two splits, and pixels that no file encodes."""

    VERSION = tfds.core.Version("2.1.0")

    def _info(self) -> Any:
        kinds = tfds.features
        pixels = kinds.Tensor(shape=(2, 3, 3), dtype=np.uint8)
        grey = kinds.Tensor(shape=(2, 3, 1), dtype=np.uint8)
        return tfds.core.DatasetInfo(
            builder=self,
            features=kinds.FeaturesDict(
                {"question": kinds.Text(), "answer": kinds.Text(), "image": pixels, "scan": grey}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(5), "test": self._generate_examples(2)}

    def _generate_examples(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for n in range(count):
            pixels = np.full((2, 3, 3), n, np.uint8)
            texts = {"question": f"{n}+1?", "answer": f"#### {n + 1}"}
            yield n, texts | {"image": pixels, "scan": pixels[..., :1]}


NAME = HardSums.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tfds") / "at@home"
    HardSums(data_dir=str(path), file_format="array_record").download_and_prepare(
        download_dir=str(path / "nothing")
    )
    return path


@pytest.mark.parametrize("file_format", ["array_record", "parquet"])
def test_prepared_data_are_an_evaluation_set(file_format: FileFormat, tmp_path: Path) -> None:
    book = [*Picturebook(size=3)]
    book.append(replace(book[1], id="the same pages again"))
    place = prepare("my_book", tmp_path, book, file_format=file_format)
    for name in (place, place.parent, f"{place}@train"):
        samples = evaluation_set("mine", data={"mine": Path(f"tfds:{name}")})
        assert [sample.turns for sample in samples] == [sample.turns for sample in book]
        assert [sample.dataset for sample in samples] == ["mine"] * 4
        for sample, page in zip(samples, book, strict=True):
            for ours, theirs in zip(sample.images, page.images, strict=True):
                np.testing.assert_array_equal(np.asarray(ours.load()), theirs)
    assert [sample.turns for sample in Prepared(place)] == [sample.turns for sample in book]
    assert len(tfds.data_source("my_book", data_dir=str(tmp_path), split="train")) == 4


def test_a_record_that_cannot_be_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that cannot be read is skipped in training, and the next ones are read."""

    def damaged(records: Any, index: int, record: Any) -> list[bytes]:
        return images_of(records, index, record if index != 1 else {})

    place = prepare("my_book", tmp_path, [*Picturebook(size=3)])
    monkeypatch.setattr("jaxspec.data.tfds_records.images_of", damaged)
    skipped = Skipped(1, tmp_path / "skipped.jsonl")
    assert len(list(readable(Path(f"tfds:{place}"), skipped))) == 2
    assert "record 2: cannot be read" in skipped.log.read_text()
    with pytest.raises(InputError, match=r"record 2: cannot be read .*; mend the record"):
        evaluation_set("mine", data={"mine": Path(f"tfds:{place}")})


def test_a_strangers_set_has_the_hubs_columns(folder: Path) -> None:
    place = f"tfds:{folder / NAME}"
    data = {"gsm8k": Path(f"{place}@test"), "pope": Path(f"{place}@train")}
    first, second = evaluation_set("gsm8k", data=data)
    assert (first.turns, second.accepted) == ((("0+1?", "#### 1"),), ("2",))
    (asked,) = evaluation_set("gsm8k", 1, data=data, shots={"gsm8k": data["pope"]})
    assert asked.turns[0][0].count("Question: ") == 5
    last = evaluation_set("pope", data=data)[-1]
    np.testing.assert_array_equal(np.asarray(last.images[0].load()), np.full((2, 3, 3), 4))


def test_the_newest_version_is_read(folder: Path, tmp_path: Path) -> None:
    """The newest version is chosen by its numbers: 10.0.0 is newer than 9.0.0, whose name sorts
    behind it.
    """
    shutil.copytree(folder / NAME / "2.1.0", tmp_path / "10.0.0")
    (tmp_path / "9.0.0").mkdir()
    (tmp_path / "9.0.0" / "features.json").touch()
    assert len(list(tfds_records(f"tfds:{tmp_path}@test"))) == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("sums", r": name its split, such as tfds:.*@train; use one of train, test"),
        (NAME, f"{NAME}: is not prepared; tfds build {NAME} --file_format array_record"),
    ],
)
def test_what_is_not_there_is_one_line(place: str, message: str, folder: Path) -> None:
    name = folder / place.replace("sums", NAME) if place.startswith("sums") else place
    with pytest.raises(InputError, match=message) as caught:
        evaluation_set("gsm8k", data={"gsm8k": Path(f"tfds:{name}")})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "my_book-train.*"])
def test_prepared_data_that_are_damaged_are_one_line(name: str, tmp_path: Path) -> None:
    place = prepare("my_book", tmp_path, [*Picturebook(size=3)])
    (file,) = place.glob(name)
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"{" * len(content)):
        file.write_bytes(damaged)
        with pytest.raises(
            InputError,
            match=r"data .*: cannot be read \(.*; check that it can be read, or prepare it again",
        ):
            list(Prepared(place))
