"""Describe chips that are not here for compilers, and compute their least times."""

from __future__ import annotations

import os
from importlib import resources
from typing import Any

from jax.experimental import topologies

from jaxspec.engine.plan import CHIPS
from jaxspec.errors import InputError, first_line, nearest

# libtpu reads these when it is loaded.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no cloud machine to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

GPUS = {
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200 141GB HBM3e",
    "b200": "NVIDIA B200",
}
"""GPUs that XLA's plugin describes, and the plugin's names for them."""
GIB = 2**30
CYCLES = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75}
"""Clock of the matrix units in GHz: a chip's published peak over the operations of one cycle. For
v6e neither the clock nor the number of units is published."""


def described(chip: str) -> list[Any]:
    """Return the devices of a topology, which need not be present."""
    kind, _, shape = chip.partition(":")
    tpus = [name for name in CHIPS if name.startswith("v")]
    if kind not in (*tpus, *GPUS) or not shape:
        raise InputError(
            f"chips: {chip!r} is not KIND:TOPOLOGY, such as v5e:2x2 or h100:4; "
            f"{nearest(kind, [*tpus, *GPUS])}"
        )
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if set(shape.split("x")) == {"1"} and kind in tpus:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        if kind in GPUS:
            options |= {"target_config": gpu_description(GPUS[kind]), "topology": f"1x1x{shape}"}
            return list(topologies.get_topology_desc(platform="cuda", **options).devices)
        return list(topologies.get_topology_desc(chip, platform="tpu", **options).devices)
    # jaxlib has no narrower error for a missing libtpu or an unknown topology.
    except Exception as error:
        raise InputError(
            f"chips: cannot compile for {chip}: {first_line(error):.120}; make compiled installs "
            "the compilers"
        ) from error


def gpu_description(name: str) -> str:
    """Return XLA's description of a GPU: a text between two zero bytes in the plugin's library."""
    library = resources.files("jax_plugins.xla_cuda12").joinpath("xla_cuda_plugin.so").read_bytes()
    offset = library.index(f'device_description_str: "{name}"'.encode())
    return library[library.rindex(b"\0", 0, offset) + 1 : library.index(b"\0", offset)].decode()


def computing_ms(kind: str, cycles: float) -> float | None:
    """Return a number of cycles as milliseconds; None for a chip whose clock is unknown."""
    clock = CYCLES.get(kind)
    return None if clock is None else cycles / clock / 1e6


def moving_ms(kind: str, size: float) -> float:
    """Return the least milliseconds in which a chip moves so many bytes from or to its memory."""
    return size / CHIPS[kind].gbps / 1e6
