"""Does a model see? Accuracy of greedy answers to picturebook's attribute questions, on the test split.

    python -m eval.attributes jaxspec/assets/mini/target
"""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
import tyro

from jaxspec.command import run_script
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel
from jaxspec.errors import check_counts
from jaxspec.evaluation.probes import probe_accuracy
from jaxspec.evaluation.report import show


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    per_kind: int = 40,
    dtype: str = "float32",
) -> None:
    """Prints the share of right answers to what, where, colour, count and sign.

    Args:
      model: directory or hub id of an LVLM.
      per_kind: questions of each kind.
      dtype: what the model computes in.
    """
    check_counts(per_kind=per_kind)
    engine = Engine(LoadedModel.load(model, jnp.dtype(dtype)), None, EngineConfig(batch_size=32))
    accuracy = probe_accuracy(engine, per_kind)
    cells = [[kind, f"{100 * share:.1f}%"] for kind, share in accuracy.items()]
    show(f"Attribute questions, {per_kind} of each kind", ["kind", "right"], cells)


if __name__ == "__main__":
    run_script(main, __doc__)
