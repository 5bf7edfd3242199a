"""Damage checkpoints by the seed: every one is read and used, or refused in one line."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from jaxspec.cli.inspect import inspect
from jaxspec.errors import InputError
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import LoadedHead, LoadedModel
from jaxspec.prompts.encoder import PromptEncoder

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *(255, 65_536, 2**31 - 1, 2**31, 2**32, 2**63, 10**30),
    *(
        *("", "x", "1", "llama", "../x", "\ud83d", "\x1b[2J", "a\nb", "a\0b"),
        "9" * 5000,
        "{{ 1 / 0 }}",
        "é" * 300,
    ),
    *([], [[]], [1, 2], [0.5, "x"], [None], [2**40] * 3, list(range(300)), {}, {"a": 1}, {"": {}}),
)
PARTS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}",
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    *(
        "{% for a in range(9) %}",
        "{% endfor %}",
        "{% set x = 'ab' * 999 %}",
        "{{ raise_exception('no') }}",
    ),
    *(
        "{{ bos_token }}",
        "{{ messages }}",
        "{{ messages[0]['content'] }}",
        "{{ messages | tojson }}",
        "{{ lipsum() }}",
    ),
    *("{{ 1 / 0 }}", "{{ x.y.z }}", "{{ 2 ** 9 }}", "{{ 3 | abs", "{{ x | join('x') }}"),
    "{{ ''.__class__ }}",
)
"""What chat templates are put together from."""


@dataclass(frozen=True)
class Outcome:
    """Record what became of one damaged checkpoint, or file of rows."""

    seed: int
    kind: str
    what: str
    """The damage, in a few words."""
    ended: str
    """`used`, `refused`, or the error and the place that it comes from."""
    seconds: float
    growth: int
    """Bytes by which the process's peak of memory rose."""

    @property
    def well(self) -> bool:
        return self.ended in ("used", "refused")


def outcome(whole: Path, scratch: Path, seed: int) -> Outcome:
    """Copy `whole`, which holds the directory `target` and may hold `head`, damage it by the seed
    and use it.
    """
    path = scratch / str(seed)
    shutil.copytree(whole, path)
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    try:
        return judge(seed, kind, KINDS[kind](path, draw), lambda: use(path))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def judge(seed: int, kind: str, what: str, used: Callable[[], object]) -> Outcome:
    """Use what was damaged, and return how that ended."""
    start, peak = time.perf_counter(), _peak()
    try:
        used()
        ended = "used"
    except InputError as error:
        said = str(error)
        ended = "refused" if said.isprintable() else f"refused in what is no line: {said!r}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        last = next((frame for frame in frames if "jaxspec" in frame.filename), frames[0])
        ended = (
            f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: "
            f"{str(error)[:200]!r}"
        )
    return Outcome(seed, kind, what, ended, time.perf_counter() - start, _peak() - peak)


def use(path: Path) -> None:
    """Inspect a target, load it and its head, if there is one, and make a prompt, with an image if
    it sees.
    """
    inspect(path / "target")
    model = LoadedModel.load(path / "target")
    if (path / "head").is_dir():
        LoadedHead.load(path / "head", model)
    pictures = [Image.new("RGB", (50, 30), "red")] if model.images else []
    prompt = PromptEncoder.of(model.config, model.tokenizer).prompt("What is it?", pictures)
    if model.images is not None:
        model.images.slots((30, 50), None)
        image_inputs(model, [prompt.images], model.images.tiles((30, 50)))


def _json(*names: str) -> Callable[[Path, random.Random], str]:
    """Return what damages one to three places of a JSON file."""

    def change(path: Path, draw: random.Random) -> str:
        there = [path / name for name in names if (path / name).is_file()]
        if not there:
            return "nothing"
        file = draw.choice(there)
        raw = json.loads(file.read_text(encoding="utf-8"))
        told = ", ".join(spoil(raw, draw) for _ in range(draw.choice((1, 1, 1, 2, 3))))
        file.write_text(json.dumps(raw), encoding="utf-8")
        return f"{file.name}: {told}"

    return change


def spoil(raw: dict[str, Any], draw: random.Random) -> str:
    """Put a hostile value at a random place of nested objects and lists, or remove or move what is
    there.
    """
    part: Any = raw
    names = []
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        if not keys:
            return "nothing"
        key = draw.choice(keys)
        names.append(str(key))
        if not isinstance(part[key], dict | list) or draw.random() < 0.25:
            break
        part = part[key]
    where, how = ".".join(names)[-60:], draw.random()
    if how < 0.1:
        del part[key]
        return f"no {where}"
    if how < 0.2:
        part[key] = part[draw.choice(keys)]
        return f"{where} as another"
    if how < 0.25:
        part[key] = deep = []
        for _ in range(draw.choice((40, 900))):
            deep.append(deep := [])
        return f"{where} nested"
    old = part[key]
    number = isinstance(old, int | float) and not isinstance(old, bool)
    near = (old * 2, old + 1, old - 1, -old, old * 1000, old / 3, str(old)) if number else ()
    part[key] = copy.deepcopy(
        draw.choice((*near, *VALUES) if draw.random() < 0.5 else near or VALUES)
    )
    return f"{where} = {str(part[key])[:40]!r}"


def _header(path: Path, draw: random.Random) -> str:
    """Damage the header of a file of weights, whose length stays right."""
    file = draw.choice(sorted(path.glob("*/*.safetensors")))
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    told = spoil(header, draw)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    return f"{file.name}: {told}"


def _template(path: Path, draw: random.Random) -> str:
    source = "".join(draw.choice(PARTS) for _ in range(draw.randint(1, 6)))
    (path / "target" / "chat_template.jinja").write_text(source, encoding="utf-8")
    return source


def _bytes(path: Path, draw: random.Random) -> str:
    """Cut a file short, or change, put in or double some of its bytes."""
    file = draw.choice(sorted(file for file in path.glob("*/*") if file.stat().st_size))
    raw = bytearray(file.read_bytes())
    at = draw.randrange(min(len(raw), draw.choice((64, 4096, len(raw)))))
    how = draw.choice(("cut", "changed", "put in", "doubled"))
    if how == "cut":
        del raw[at:]
    elif how == "changed":
        for place in range(at, min(at + draw.choice((1, 1, 8)), len(raw))):
            raw[place] = draw.randrange(256)
    else:
        raw[at:at] = draw.randbytes(5) if how == "put in" else raw[:at]
    file.write_bytes(raw)
    return f"{file.name}: {how} at {at}"


def _files(path: Path, draw: random.Random) -> str:
    """Replace a file by nothing, an empty one, another one, a folder, a pipe, or a link."""
    files = sorted(path.glob("*/*"))
    file, other = draw.sample(files, 2)
    how = draw.choice(("missing", "empty", "another", "folder", "pipe", "link", "loop"))
    content = other.read_bytes()
    file.unlink()
    if how == "empty":
        file.touch()
    elif how == "another":
        file.write_bytes(content)
    elif how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how in ("link", "loop"):
        file.symlink_to("/etc/passwd" if how == "link" else file)
    return f"{file.name}: {how} ({other.name})"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "config": _json("target/config.json"),
    "generation settings": _json("target/generation_config.json"),
    "tokenizer": _json("target/tokenizer.json"),
    "tokenizer settings": _json("target/tokenizer_config.json"),
    "image processor": _json("target/preprocessor_config.json", "target/processor_config.json"),
    "index": _json("target/model.safetensors.index.json"),
    "KV head": _json("head/config.json"),
    "header": _header,
    "chat template": _template,
    "bytes": _bytes,
    "files": _files,
}


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
