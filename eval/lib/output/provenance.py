"""Record where results come from: the options, models and data of a run, and the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxspec
from jaxspec.checkpoints.locating import hub_id
from jaxspec.training.loop.signatures import file_signature
from jaxspec_demo import ASSETS

PACKAGES = ("jax", "jaxlib", "flax", "transformers", "numpy")
NO_OPTIONS = ("out", "published", "scores", "cluster", "against")
INPUTS = (
    *("target", "draft", "kv_head", "adapter", "captioner", "captioners", "models", "tokenizer"),
    *("drafts", "heads", "baselines", "data", "shots", "released", "images"),
)
"""Options that name models and data: ids, paths, and NAME=PATH, KIND:PATH or PATH:VIEW."""


def describe_run(preset: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device, versions and options of a measurement."""
    device = jax.devices()[0]
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "preset": preset,
        "options": deciding_options(options),
        "device": f"{device.device_kind} ({device.platform})",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {"jaxspec": jaxspec.__version__} | {name: version(name) for name in PACKAGES},
        "git": _git(),
    }


def input_signatures(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of the models and data that options name, by those names."""
    signatures = {}
    # Dataclasses inside, such as pairings, have options of their own.
    for name, value in json.loads(_as_json(options)).items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                signatures |= input_signatures(part)
            elif name in INPUTS and isinstance(part, str) and (path := _path_in(part)):
                shipped = part.replace(f"{ASSETS.parent}/", "")
                signatures[f"{name} {shipped}"] = file_signature(path)
    return signatures


def _path_in(text: str) -> Path | None:
    """Return the file or folder that an option names, or the cached copy of a model on the hub."""
    ends = [text[mark.end() :] for mark in re.finditer("^|[=:]", text)]
    for source in (*ends, *(end.rpartition(":")[0] for end in ends)):
        if source and os.path.exists(Path(source).expanduser()):
            return Path(source).expanduser()
        if parts := hub_id(source):
            from huggingface_hub import try_to_load_from_cache

            name, revision = parts
            file = try_to_load_from_cache(name, "config.json", revision=revision)
            if isinstance(file, str):
                return Path(file).parent
    return None


def deciding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide the results, with shipped files relative to the checkout."""
    deciding = json.loads(_as_json(options).replace(f"{ASSETS.parent}/", ""))
    return {name: deciding[name] for name in deciding if name not in NO_OPTIONS}


def _as_json(options: Mapping[str, Any]) -> str:
    return json.dumps(
        dict(options), default=lambda value: vars(value) if is_dataclass(value) else str(value)
    )


def _processor() -> str:
    """Return the CPU's name, on Linux with family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    names = {"model name": "", "cpu family": "family ", "model": "model "}
    return (
        ", ".join(f"{word}{fields[name]}" for name, word in names.items() if name in fields)
        or platform.machine()
    )


def _git() -> str | None:
    """Return the commit of the working tree, marked if it has changes; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
