"""Refuse a mistyped option before jax is imported, which takes seconds.

The options are read from the source of this folder: fields of the command's dataclass, of its
bases, and of the dataclasses that its fields are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.errors import nearest

CLASSES = {
    name: name.capitalize() for name in ("generate", "collaborate", "export", "import", "inspect")
} | {"drafts": "Drafts", "plan": "Plans", "serve": "Serve"}
"""The dataclass of each command's options."""


def mistake(arguments: Sequence[str]) -> str:
    """Return the error of the first option that the command, `arguments[0]`, lacks, or nothing."""
    command, *words = arguments or [""]
    if command not in CLASSES or not {"-h", "--help"}.isdisjoint(words):
        return ""
    names = options(command)
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--[a-z]", name) and name.replace("_", "-") not in names:
            advice = nearest(name, names, f"see jaxspec {command} --help")
            return f"{name}: no such option; {advice}"
    return ""


def options(command: str) -> list[str]:
    """Return the names of a command's options. A flag that is on by default has a `no` in its."""
    sources = (path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    nodes = (node for text in sources for node in ast.parse(text).body)
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> Iterator[str]:
        """Yield the options that a class declares: of its bases, its groups and its own fields."""
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes:
                yield from fields(base.id)
        for field in classes[name].body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            annotation = ast.unparse(field.annotation)
            types = {n.id for n in ast.walk(field.annotation) if isinstance(n, ast.Name)}
            if groups := sorted(types & classes.keys()):
                for group in groups:
                    yield from fields(group)
            elif "Positional" not in annotation:
                alias = re.search(r"\bname='(\w+)'", annotation)
                option = alias[1] if alias else field.target.id.replace("_", "-")
                off = isinstance(field.value, ast.Constant) and field.value.value is True
                yield f"--no-{option}" if off else f"--{option}"

    return ["--help", *fields(CLASSES[command])]
