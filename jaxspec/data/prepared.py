"""Read training samples at random access, from prepared data and weighted mixtures of them.

A folder of prepared data is `OUT/NAME/2.0.0`, a TFDS data set of one split, `train`. Its shards
are ArrayRecord files, read at random here and by `tfds.data_source`. Images keep their files'
encoding, and an image that several rows show is written once. TensorFlow is not needed.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import grain
import numpy as np
import tensorflow_datasets as tfds
from tqdm import tqdm

from jaxspec.data.images import StoredImage, as_png
from jaxspec.data.samples import Sample
from jaxspec.data.tfds_records import images_of
from jaxspec.errors import InputError, reading
from jaxspec.files import sole, writing

SPLIT = "train"
MEND = "check that it can be read, or prepare it again"
FileFormat = Literal["array_record", "parquet"]
"""Format of the shards. `tfds.load` reads parquet, with TensorFlow; here it is held in memory."""


def mixture(sources: Sequence[tuple[Sequence[Sample], float]], seed: int) -> Any:
    """Return an endless sequence of samples from all sources: a Grain `MapDataset`, read by index.

    Each source is shuffled anew in each of its epochs; the order is a function of the seed.

    Args:
      sources: Samples, and the weight of their share.
      seed: Seed of the shuffles.
    """
    parts = [
        grain.MapDataset.source(source).seed(seed + number).shuffle().repeat()
        for number, (source, _) in enumerate(sources)
    ]
    return grain.MapDataset.mix(parts, [weight for _, weight in sources])


class Prepared(Sequence[Sample]):
    """Read prepared samples one by one from their shards; other processes can unpickle it.

    Raises InputError for a path without prepared data.

    Args:
      path: `OUT/NAME/2.0.0`, or `OUT/NAME`.
    """

    def __init__(self, path: Path) -> None:
        inner = path / str(Conversations.VERSION)
        folder = inner if _prepared(inner) else path
        if not _prepared(folder):
            raise InputError(f"data {path}: no prepared data; make it with python -m train.prepare")
        self.path = path
        with reading(f"data {path}: cannot be read", MEND):
            read: Any = tfds.builder_from_directory
            builder = read(str(folder))
            self.metadata: dict[str, Any] = dict(builder.info.metadata or {})
            self._records: Any = builder.as_data_source(SPLIT)
            self._size = len(self._records)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of a number; slices are not read."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        with reading(f"data {self.path} record {index + 1}: cannot be read", MEND):
            record = self._records[int(index)]
            files = images_of(self._records, index, record)
            name, turns = record["id"].decode(), record["turns"]
            sizes = [(int(height), int(width)) for height, width in record["sizes"]]
            origin = f"{self.path} {name}"
            contents = zip(files, sizes)
            images = tuple(StoredImage(content, origin, size) for content, size in contents)
            pairs = zip(turns["question"], turns["answer"])
            dialogue = tuple((question.decode(), answer.decode()) for question, answer in pairs)
            system = record.get("system", b"").decode()  # data of earlier releases has none
            return Sample(name, self.path.name, images, dialogue, system=system)


class Conversations(tfds.core.GeneratorBasedBuilder):
    """Build a TFDS set of samples in their order; `metadata()`, called last, is stored too."""

    VERSION = tfds.core.Version("2.0.0")

    def __init__(
        self,
        name: str,
        out: Path,
        samples: Iterable[Sample],
        metadata: Callable[[], dict[str, Any]] = dict,
        file_format: FileFormat = "array_record",
    ) -> None:
        # One class serves all sets; TFDS would take the name from the class.
        self.name = name  # type: ignore[misc]
        self._samples, self._metadata = samples, metadata
        super().__init__(data_dir=str(out), file_format=file_format)

    def _info(self) -> tfds.core.DatasetInfo:
        """Return the fields of a record."""
        kinds = tfds.features
        # Not `Image`: without TensorFlow it can neither pass bytes through nor decode a sequence.
        encoded: Any = kinds.Tensor(shape=(), dtype=np.object_)  # type: ignore[arg-type]
        reference: Any = kinds.Tensor(shape=(2,), dtype=np.int64)  # type: ignore[arg-type]
        size: Any = kinds.Tensor(shape=(2,), dtype=np.int32)  # type: ignore[arg-type]
        features = {
            "id": kinds.Text(),
            "images": kinds.Sequence(encoded),  # those that no earlier row shows
            "shown": kinds.Sequence(reference),  # row and index of every image, see `images_of`
            "sizes": kinds.Sequence(size),
            "system": kinds.Text(),
            "turns": kinds.Sequence({"question": kinds.Text(), "answer": kinds.Text()}),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=kinds.FeaturesDict(features),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,  # loading shuffles
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {SPLIT: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each sample's number and record; an image is in the first record that shows it."""
        first: dict[bytes, tuple[int, int]] = {}  # row that holds an image, and its index there
        for number, sample in enumerate(self._samples):
            images = [
                image
                if isinstance(image, StoredImage)
                else StoredImage(as_png(image), "in memory", image.shape[:2])
                for image in sample.images
            ]
            new, references = [], []
            for image in images:
                reference = first.setdefault(sha256(image.content).digest(), (number, len(new)))
                if reference == (number, len(new)):
                    new.append(image.content)
                references.append(reference)
            sizes = [image.size for image in images]
            turns = [{"question": question, "answer": answer} for question, answer in sample.turns]
            row = {"images": new, "shown": references, "sizes": sizes, "turns": turns}
            yield number, {"id": sample.id, "system": sample.system, **row}
        metadata: Any = self.info.metadata
        metadata.update(self._metadata())


def data_folder(name: str, out: Path) -> Path:
    """Return the folder of a data set's name. Raises InputError for a name that TFDS refuses."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise InputError(f"name {name!r}: give lower-case words joined by _, such as my_photos")
    return out / name / str(Conversations.VERSION)


def prepare(
    name: str,
    out: Path,
    samples: Iterable[Sample],
    total: int | None = None,
    metadata: Callable[[], dict[str, Any]] = dict,
    file_format: FileFormat = "array_record",
    lost: Callable[[], str] = lambda: "give some",
) -> Path:
    """Write the samples to `out/name/2.0.0`, in shards of 64 MB to 1 GB, and return that folder.

    A run that fails or is stopped leaves no files; the leftovers of a killed run are removed.
    Raises InputError if there are no samples, the folder exists, or another run prepares it now.

    Args:
      total: Number of samples, for the progress bar.
      metadata: Function whose result, after the last sample, is kept with the data.
      file_format: Format of the shards.
      lost: Function that says where the samples went, for the error that no sample is left.
    """
    folder = data_folder(name, out)
    count = 0

    def counted() -> Iterator[Sample]:
        nonlocal count
        for sample in tqdm(samples, desc=name, total=total, unit="sample", delay=1, disable=None):
            count += 1
            yield sample
        if not count:
            raise InputError(f"data {name}: no sample is left; {lost()}")

    with sole(out / f"{name}.lock"):
        if folder.exists():
            raise InputError(f"{folder}: holds prepared data already; give another name")
        for leftover in folder.parent.glob(f"incomplete.*_{folder.name}"):
            shutil.rmtree(leftover)
        tfds.disable_progress_bar()
        # TFDS prints sizes that it does not know, and makes a folder for downloads.
        with writing(folder), redirect_stdout(io.StringIO()), TemporaryDirectory() as nowhere:
            builder = Conversations(name, out, counted(), metadata, file_format)
            builder.download_and_prepare(download_dir=nowhere)
    return folder


def _prepared(folder: Path) -> bool:
    return (folder / "dataset_info.json").is_file() and (folder / "features.json").is_file()
