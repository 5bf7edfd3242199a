"""Two processes load one checkpoint onto one mesh: each holds, and reads, only its half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel
from jaxspec.checkpoints.huggingface import load
from tests import tiny
from tests.multiprocess.pairs import run_pair

pytestmark = pytest.mark.full

CHILD = """
import json, sys
import jax
import numpy as np
from pathlib import Path
address, number, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(address, 2, number)
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.sharding import make_mesh
read = StoredTensor.read
counted = []
def counting(self, box=None):
    out = read(self, box)
    counted.append(out.nbytes)
    return out
StoredTensor.read = counting
found = load(path, mesh=make_mesh(model=2))
mlp = found.params["language_model"]["model"]["layers_1"]["mlp"]
names = ("gate_proj", "down_proj")
parts = {name: mlp[name]["weight"].addressable_shards[0].data for name in names}
answer = {name: np.asarray(part).tolist() for name, part in parts.items()}
print(json.dumps(answer | {"read": sum(counted), "held": found.report.nbytes}))
"""


def test_each_process_reads_its_half(tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model", tiny.CONFIG, tiny.random_params(tiny.CONFIG))
    said = run_pair(CHILD, lambda address, number: (address, number, path))
    answers = [json.loads(out.splitlines()[-1]) for out, _ in said]
    whole = load(path)
    mlp = whole.params["language_model"]["model"]["layers_1"]["mlp"]
    for name, axis in (("gate_proj", 0), ("down_proj", 1)):
        halves = np.split(np.asarray(mlp[name]["weight"]), 2, axis)
        for answer, half in zip(answers, halves):
            np.testing.assert_array_equal(np.asarray(answer[name], np.float32), half)
    for answer in answers:
        # Norms, biases and positions are whole on both; at these widths they are a quarter of the
        # model.
        assert answer["read"] == answer["held"] < 0.7 * whole.report.nbytes


SIZES: Any = {"prompt_buckets": [64], "new_buckets": [16], "image_buckets": [1]}
DRAFTED = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_matmul_precision", "highest")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxspec import Engine, EngineConfig, LoadedModel
from jaxspec.loading.models import load_draft
from jaxspec.sharding import make_mesh
from tests import tiny
target = LoadedModel.load(sys.argv[3], mesh=make_mesh(model=2))
config = EngineConfig(views=("M",), gamma=2, **json.loads(sys.argv[5]))
engine = Engine(target, load_draft(sys.argv[4], target), config)
print(json.dumps(engine.generate([tiny.request_of(engine, "What?", 1)])[0].tokens))
"""


def test_a_draft_that_sees_drafts_for_a_target_in_two_processes(tmp_path: Path) -> None:
    """A draft that sees drafts for a target in two processes, although none holds the whole tower,
    which is compared with the draft's.
    """
    pair = tiny.save_pair(tmp_path)
    said = run_pair(DRAFTED, lambda address, number: (address, number, *pair, json.dumps(SIZES)))
    engine = Engine(LoadedModel.load(pair[0]), None, EngineConfig(**SIZES))
    plain = engine.generate([tiny.request_of(engine, "What?", 1)])[0]
    assert [tuple(json.loads(out.splitlines()[-1])) for out, _ in said] == [plain.tokens] * 2
