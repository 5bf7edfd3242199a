"""An evaluation, and a target's answers to a data set, give in two processes what they give in
one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval import block_efficiency
from jaxspec.data.prepared import Prepared, prepare
from jaxspec.errors import InputError
from tests import tiny
from tests.multiprocess.pairs import run_pair
from tests.tiny import Talk
from train import distill_data

pytestmark = pytest.mark.full

CHILD = """
import json, sys
import jax
words = json.loads(sys.argv[1])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_default_matmul_precision", "highest")
from eval import block_efficiency
from jaxspec.cluster import in_all, process
from jaxspec.errors import InputError
from eval.lib.drafts import comparison as measured
from eval.lib.output.report import Run
from jaxspec.sharding import Placement
from train import distill_data
block_efficiency.draw_all = lambda *_: []
measured.time_passes = lambda *_: None
block_efficiency.main(words["table"])
out = __import__("pathlib").Path(words["out"])
distill_data.main(distill_data.Options(**{**words["answers"], "out": out}))
assert (out.parent / "0" / "talk_t0").exists()  # the second waits for the first
devices = Placement(model_parallel=2).mesh(1).devices.flat
assert {device.process_index for device in devices} == {process()[0]}
stopped, again = (Run("tiny", {}, out / "stopped") for _ in "ab")
stopped.add([{"dataset": "a", "turn": 1, "row": "M"}], [{"dataset": "a", "turn": 1, "row": "M"}])
stopped.write()
again.restore()
assert (again.rows, again.records) == (stopped.rows, stopped.records)
def refuse():
    if process()[0] == 0:
        raise InputError("long " * 50 + "; mend it")
for work in (refuse, lambda: 1 // process()[0]):
    try:
        in_all(work)
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        print(type(error).__name__, error)
"""
TABLE = (
    *("mini", "--rows", "MT*", "--limit", "3", "--gamma", "2", "--max-new-tokens", "6"),
    *("--batch-size", "2", "--prompt-buckets", "128", "--image-buckets", "2", "--sets"),
)
PLACE = ("dataset", "turn", "row")
SAME = (*PLACE, "samples", "tokens_per_pass", "acceptance_histogram", "token_identity_rate")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the words of both commands."""
    folder = tmp_path_factory.mktemp("asked")
    target, draft = tiny.save_pair(folder / "pair")
    many = target / "generation_config.json"  # so that answers end
    many.write_text(json.dumps({"eos_token_id": [*range(5, 60, 4)]}))
    Image.new("RGB", (28, 28), "red").save(folder / "a.png")
    lines = [
        json.dumps({"id": f"q{i}", "image": "a.png", "turns": [f"What {i}?", "Why?"]})
        for i in range(3)
    ]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    data = prepare("talk", folder, [Talk()[i] for i in range(5)])
    models = ["--target", str(target), "--draft", str(draft)]
    table = [*TABLE, f"mine={folder / 'mine.jsonl'}", *models]
    answers = {
        "target": str(target),
        "data": str(data),
        "name": "talk_t0",
        "max_new_tokens": 6,
        "chunk": 3,
    }
    return {
        "table": table,
        "answers": answers | {"batch_size": 2, "prompt_buckets": [128], "image_buckets": [2]},
    }


def check(found: Path, expected: Path) -> None:
    for name in ("results.json", "records.jsonl"):
        assert read(found / "table" / name) == read(expected / "table" / name)
    prompts, expected_prompts = (
        (folder / "table" / "prompts.jsonl").read_text() for folder in (found, expected)
    )
    assert prompts == expected_prompts
    ours, theirs = (Prepared(folder / "talk_t0") for folder in (found, expected))
    assert [sample.turns for sample in ours] == [sample.turns for sample in theirs]
    assert len(theirs)
    for chunk in sorted((expected / "talk_t0.answers").glob("*.jsonl")):
        assert (found / "talk_t0.answers" / chunk.name).read_text() == chunk.read_text()


def read(file: Path) -> list[Any]:
    """Return what does not depend on the clock."""
    text = file.read_text()
    if file.suffix == ".json":
        return [[row.get(field) for field in SAME] for row in json.loads(text)["rows"]]
    return [
        [record.get(field) for field in (*PLACE, "sample", "text")]
        for record in map(json.loads, text.splitlines())
    ]


def test_a_batch_that_does_not_divide_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data_parallel: 3 parts do not divide a batch of 2"):
        block_efficiency.main([*asked["table"], "--out", str(tmp_path), "--data-parallel", "3"])


def test_two_processes_give_the_table_of_one(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_efficiency, "draw_all", lambda *_: [])
    monkeypatch.setattr("eval.lib.drafts.comparison.time_passes", lambda *_: None)
    block_efficiency.main([*asked["table"], "--out", str(tmp_path / "alone" / "table")])
    answers = asked["answers"] | {"prompt_buckets": (128,), "image_buckets": (2,)}
    distill_data.main(distill_data.Options(**answers, out=tmp_path / "alone"))

    def words(address: str, number: int) -> list[str]:
        out = tmp_path / str(number)
        table = [*asked["table"], "--out", str(out / "table"), "--cluster", f"{address},2,{number}"]
        return [json.dumps({"table": table, "answers": asked["answers"], "out": str(out)})]

    (first, told), (second, quiet) = run_pair(CHILD, words)
    check(tmp_path / "0", tmp_path / "alone")
    assert not (tmp_path / "1").exists()  # the first writes
    assert first.endswith("ZeroDivisionError integer division or modulo by zero\n")
    assert second.endswith("RuntimeError process 0: integer division or modulo by zero\n")
    assert "; mend it\n" in second  # whole, also from the other process
    assert "wrote" in told
    assert "wrote" not in quiet
