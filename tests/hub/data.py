"""Twins stand in for every data set that is read from the hub, as its repository holds it, with
three rows or so in each file.

A twin has the configurations, splits, files and columns of its original, and images as `datasets`
stores them. What no public material showed is marked `UNSEEN`, and is as the other sets of its
maker have it.
"""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CARD = "card on huggingface.co"
TREE = "files on huggingface.co"
LMMS = (
    "columns that EvolvingLMMs-Lab/lmms-eval reads, and those of the original's annotations; "
    "card UNSEEN"
)
STORIES = ("IEdit", "MagicBrush", "Spot-the-Diff", "PororoSV", "VIST")
LETTERS = tuple(f"image_{i}" for i in range(12))


@dataclass(frozen=True)
class Part:
    """Describe a configuration's split."""

    columns: str
    """Names, with `:image`, `:texts`, `:int`, `:talk` or `:votes` behind what is no text."""
    shards: int = 1
    rows: int = 3
    values: dict[str, Any] = field(default_factory=dict)
    """Values of a column: one for all rows, or a list with each row's."""
    format: str = "PNG"
    mode: str = "RGB"
    """How images are encoded."""


@dataclass(frozen=True)
class DataTwin:
    """Describe what one repository holds."""

    source: str
    """Where its files and columns were seen."""
    parts: dict[tuple[str, str], Part] = field(default_factory=dict)
    """By configuration and split."""
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows by the names of their files: `.json` is one list, `.jsonl` has a row a line, `.gz` is
    packed.
    """


_TEXTVQA = (
    "image_id question_id:int question question_tokens:texts image:image image_width:int "
    "image_height:int "
    "flickr_original_url flickr_300k_url answers:texts image_classes:texts set_name "
    "ocr_tokens:texts"
)
_TEXTCAPS = (
    "question_id question image:image image_id image_classes:texts flickr_original_url "
    "flickr_300k_url image_width:int "
    "image_height:int set_name image_name image_path caption_id:ints caption_str:texts "
    "reference_strs:texts"
)
_DOCVQA = (
    "questionId question question_types:texts image:image docId:int ucsf_document_id "
    "ucsf_document_page_no "
    "answers:texts data_split"
)
_VQAV2 = (
    "question_type multiple_choice_answer answers:votes image_id:int answer_type "
    "question_id:int question image:image"
)
_HALLUSION = (
    "category subcategory visual_input set_id figure_id sample_note question_id question "
    "gt_answer_details gt_answer "
    "filename"
)
_SCIENCE = (
    "image:image question choices:texts answer:int8 hint task grade subject topic category "
    "skill lecture solution"
)
_INTERLEAVED = {
    "sub_task": [name for name in STORIES for _ in range(3)],
    "question": "Image 1: <image>. Image 2: <image>. What was changed?",
    "question_type": "open-ended",
    **dict.fromkeys(LETTERS[2:], None),
}
_MMLU = {
    "subject": [*["law"] * 5, *["art"] * 5],
    "choices": ["no", "yes", "both", "none"],
    "answer": 1,
}
_SUMS = {"question": "How many are 1 and 2?", "answer": "They are <<1+2=3>>3.\n#### 3"}
_PAJAMAS = (
    "arxiv",
    "book",
    "c4",
    "github",
    *(f"cc_20{part}" for part in ["19-30", "20-05", "21-04", "22-05", "23-06"]),
)
_SAID = "\n<human>: How many are 1 and 2?\n<bot>: They are 3."


def _message(role: str, text: str, rank: int | None, *replies: dict[str, Any]) -> dict[str, Any]:
    known = {
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "synthetic": False,
        "lang": "en",
    }
    return {
        "message_id": text[:4],
        "text": text,
        "role": role,
        **known,
        "rank": rank,
        "replies": list(replies),
    }


_TREE = _message(
    *("prompter", "Which animal barks?", None),
    _message("assistant", "A cat does.", 1),
    _message("assistant", "A dog does.", 0, _message("prompter", "And which one purrs?", None)),
)


def _talks(image: Any, question: str = "<image>\nWhat is this?") -> list[dict[str, Any]]:
    """Return rows in LLaVA's form; an image is a path, or several, with the row's number in the
    place of {}.
    """
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": "A tree."}]
    numbered = [
        image.format(i) if isinstance(image, str) else [path.format(i) for path in image]
        for i in range(4)
    ]
    return [
        {"id": str(i), "conversations": said} | ({"image": numbered[i]} if image else {})
        for i in range(4)
    ]


def _parts(columns: str, *places: str, **fields: Any) -> dict[tuple[str, str], Part]:
    """Return parts of the same columns, by their places `configuration/split`."""
    return {
        (place.rpartition("/")[0], place.rpartition("/")[2]): Part(columns, **fields)
        for place in places
    }


_RECAP = _parts(
    "id image:image conversations:talk data_source", "default/train", format="JPEG", shards=2
)

DATA: dict[str, DataTwin] = {
    "liuhaotian/LLaVA-Pretrain": DataTwin(
        f"{TREE}; rows: github haotian-liu/LLaVA, docs/Data.md",
        lines={"blip_laion_cc_sbu_558k.json": _talks("{}.jpg")},
    ),
    "liuhaotian/LLaVA-Instruct-150K": DataTwin(
        f"{TREE}; rows: github haotian-liu/LLaVA, docs/Finetune_Custom_Data.md",
        lines={"llava_v1_5_mix665k.json": _talks("{}.jpg") + _talks("", "Which animal barks?")},
    ),
    "Aeala/ShareGPT_Vicuna_unfiltered": DataTwin(
        f"files: scripts that fetch it by its address; rows: {CARD} of its source",
        lines={"ShareGPT_V4.3_unfiltered_cleaned_split.json": _talks("", "Which animal barks?")},
    ),
    **{
        f"lmms-lab/LLaVA-ReCap-{name}": DataTwin(f"{TREE}; columns: {CARD}", _RECAP)
        for name in ("558K", "118K", "CC3M")
    },
    "lmms-lab/LLaVA-OneVision-Mid-Data": DataTwin(
        f"{TREE}; rows: github LLaVA-VL/LLaVA-NeXT, scripts/train/README.md",
        lines={
            f"{name}/{name}_processed.json": _talks("{}.jpg")
            for name in ("ureader_tr", "synthdog_en", "synthdog_zh")
        }
        | {"evol_instruct/evol_instruct_processed.json": _talks("", "Which animal barks?")},
    ),
    "lmms-lab/LLaVA-OneVision-Data": DataTwin(
        f"{TREE}; columns: {CARD}",
        _parts(
            "id image:image conversations:talk data_source",
            *(f"{name}(cauldron,llava_format)/train" for name in ("ai2d", "chartqa")),
        ),
    ),
    "lmms-lab/M4-Instruct-Data": DataTwin(
        f"{TREE}; {CARD}; rows UNSEEN",
        lines={
            f"m4_instruct_{name}.json": _talks(
                ("{}.jpg", "0.jpg"), "<image><image>\nWhat was changed?"
            )
            for name in ("annotations", "video")
        },
    ),
    "lmms-lab/POPE": DataTwin(
        f"{TREE}; columns on the card of the copy giobin/POPE",
        _parts(
            "id question_id question answer image_source image:image category",
            "default/test", shards=3, values={"answer": "yes"}, format="JPEG",
        ),
    ),
    "lmms-lab/LMMs-Eval-Lite": DataTwin(
        f"{TREE}; columns of the {CARD} of lmms-lab/DocVQA",
        _parts(_DOCVQA, "docvqa_val/lite", mode="L"),
    ),
    "lmms-lab/ChartQA": DataTwin(
        f"{TREE}; columns on the card of the copy qywang1106/chartqa_split_2_2; number of "
        "files UNSEEN",
        _parts("type question answer image:image", "default/test", values={"type": "human_test"}),
    ),
    "lmms-lab/textvqa": DataTwin(
        f"{TREE}; columns on the card of the copy pppop7/textvqa; number of files UNSEEN",
        _parts(_TEXTVQA, "default/validation", shards=3, format="JPEG"),
    ),
    "lmms-lab/VQAv2": DataTwin(
        f"{CARD}; number of files UNSEEN",
        _parts(_VQAV2, "default/validation", shards=2, format="JPEG"),
    ),
    "lmms-lab/llava-bench-in-the-wild": DataTwin(
        f"{TREE}; {LMMS}",
        _parts(
            "question_id question image:image caption gpt_answer category image_id",
            "default/train",
        ),
    ),
    "lmms-lab/MMVet": DataTwin(
        f"{TREE}; {LMMS}",
        _parts("question_id image:image question answer image_source capability", "default/test"),
    ),
    "lmms-lab/LLaVA-NeXT-Interleave-Bench": DataTwin(
        f"{TREE}; {CARD}",
        _parts(
            f"sample_id:int sub_task {' '.join(f'{name}:image' for name in LETTERS)} "
            "question answer question_type",
            "in_domain/test", rows=15, values=_INTERLEAVED, format="JPEG",
        ),
    ),
    "google-research-datasets/nq_open": DataTwin(
        f"{CARD}; files UNSEEN",
        _parts(
            "question answer:texts", "nq_open/train", "nq_open/validation",
            values={"question": "who wrote it"},
        ),
    ),
    "openai/gsm8k": DataTwin(
        f"{CARD}; files: nickmalhotra/ProjectIndus names them",
        _parts("question answer", "main/train", "main/test", rows=5, values=_SUMS),
    ),
    "openai/openai_humaneval": DataTwin(
        f"{TREE}; columns UNSEEN",
        _parts(
            "task_id prompt canonical_solution test entry_point", "openai_humaneval/test",
            values={
                "prompt": "def f(x):\n", "canonical_solution": "    return x\n",
                "entry_point": "f", "test": "def check(candidate):\n    assert candidate(1) == 1\n",
            },
        ),
    ),
    "cais/mmlu": DataTwin(
        f"{CARD} of the copy hails/mmlu_no_train",
        _parts(
            "question subject choices:texts answer:int",
            "all/dev", "all/validation", "all/test", rows=10, values=_MMLU,
        ),
    ),
    "abisee/cnn_dailymail": DataTwin(
        f"{TREE}; columns: TFDS's catalogue of it; number of files UNSEEN",
        _parts("article highlights id", "3.0.0/train", shards=3)
        | _parts("article highlights id", "3.0.0/test"),
    ),
    "lmms-lab/HallusionBench": DataTwin(
        f"{TREE}; {LMMS}",
        _parts(f"{_HALLUSION} image:image", "default/image", mode="RGBA")
        | _parts(f"{_HALLUSION} image", "default/non_image", values={"image": None}),
    ),
    "echo840/OCRBench": DataTwin(
        f"{CARD}; number of files UNSEEN",
        _parts("dataset question question_type answer:texts image:image", "default/test"),
    ),
    "lmms-lab/TextCaps": DataTwin(
        f"{TREE}; {CARD}", _parts(_TEXTCAPS, "default/val", shards=2, format="JPEG")
    ),
    "lmms-lab/ScienceQA": DataTwin(
        f"{TREE}; {CARD}",
        _parts(
            _SCIENCE, "ScienceQA-IMG/test", "ScienceQA-FULL/test",
            values={"choices": ["sun", "moon"], "answer": 1, "hint": ""},
        ),
    ),
    "lmms-lab/COCO-Caption2017": DataTwin(
        f"{TREE}; {LMMS}",
        _parts(
            "question_id image:image question answer:texts id:int license:int file_name "
            "coco_url height:int "
            "width:int date_captured",
            "default/val", shards=2, format="JPEG",
        ),
    ),
    "togethercomputer/RedPajama-Data-1T-Sample": DataTwin(
        f"{TREE}; columns: its RedPajama-Data-1T-Sample.py",
        lines={
            f"{name}_sample.jsonl": [{"text": f"A text of {name}, to be read.\n" * 9, "meta": "{}"}]
            for name in (*_PAJAMAS, "stackexchange", "wikipedia")
        },
    ),
    "laion/OIG": DataTwin(
        f"{TREE}; its card on the texts' form",
        lines={
            "unified_chip2.jsonl": [{"text": _SAID, "metadata": {"source": "unified_chip2"}}] * 3,
            "unified_basic.jsonl": [{"text": "not asked for"}],
        },
    ),
    "OpenAssistant/oasst1": DataTwin(
        f"{TREE}; {CARD}, with an example of a tree",
        lines={
            "2023-04-12_oasst_ready.trees.jsonl.gz": [
                {"message_tree_id": str(i), "tree_state": "ready_for_export", "prompt": _TREE}
                for i in range(3)
            ],
            "2023-04-12_oasst_ready.messages.jsonl.gz": [
                {"message_id": "1", "text": "not asked for"}
            ],
        },
    ),
}  # fmt: skip


def write(folder: Path, twin: DataTwin) -> None:
    """Write a twin's files: its card, parquet, and JSONL."""
    import pyarrow
    from pyarrow import parquet

    cards: dict[str, list[dict[str, str]]] = {}
    for (config, split), part in twin.parts.items():
        stem = f"{'data' if config == 'default' else config}/{split}"
        cards.setdefault(config, []).append({"split": split, "path": f"{stem}-*"})
        schema = pyarrow.schema([_typed(pyarrow, *column) for column in _columns(part)])
        for shard in range(part.shards):
            numbers = range(shard * part.rows, (shard + 1) * part.rows)
            rows = [
                {name: _value(part, name, kind, i) for name, kind in _columns(part)}
                for i in numbers
            ]
            file = folder / f"{stem}-{shard:05d}-of-{part.shards:05d}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file, row_group_size=2)
    for name, rows in twin.lines.items():
        lines = (
            json.dumps(rows)
            if name.endswith(".json")
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(
            gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode()
        )
    configs = [{"config_name": config, "data_files": files} for config, files in cards.items()]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n\n# A twin\n")


def _columns(part: Part) -> list[tuple[str, str]]:
    return [
        (name, kind or "text")
        for name, _, kind in (word.partition(":") for word in part.columns.split())
    ]


def _typed(pyarrow: Any, name: str, kind: str) -> tuple[str, Any]:
    text = pyarrow.string()
    types = {
        **{"text": text, "texts": pyarrow.list_(text), "ints": pyarrow.list_(pyarrow.int64())},
        **{"int": pyarrow.int64(), "int8": pyarrow.int8()},
        "image": pyarrow.struct([("bytes", pyarrow.binary()), ("path", text)]),
        "talk": pyarrow.list_(pyarrow.struct([("from", text), ("value", text)])),
        "votes": pyarrow.list_(
            pyarrow.struct(
                [("answer", text), ("answer_confidence", text), ("answer_id", pyarrow.int64())]
            )
        ),
    }
    return name, types[kind]


def _value(part: Part, name: str, kind: str, number: int) -> Any:
    if name in part.values:
        told = part.values[name]
        return told[number] if isinstance(told, list) and kind != "texts" else told
    if kind == "image":
        pixels = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).convert(part.mode).save(out, part.format)
        return {"bytes": out.getvalue(), "path": f"{number}.{part.format.lower()}"}
    if kind == "talk":
        return [
            {"from": "human", "value": "<image>\nWhat is this?"},
            {"from": "gpt", "value": "A tree."},
        ]
    if kind == "votes":
        return [{"answer": "red", "answer_confidence": "yes", "answer_id": i + 1} for i in range(2)]
    if kind == "texts":
        return [f"{name} {number}", f"{name}, once more"]
    return {"ints": [number], "int": number, "int8": number}.get(kind, f"The {name} of {number}?")
