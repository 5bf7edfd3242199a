"""What tests, scripts and presets take from a module by name is there.

Type checkers do not read tests, and collecting them runs no function. So a test that names what
another change has moved would fail only once it runs.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("configs", "eval", "jaxspec", "jaxspec_demo", "tests", "train")
FILES = sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))


def ours(name: str) -> bool:
    return name.partition(".")[0] in OURS


def loaded(name: str) -> ModuleType | None:
    """Return the module, or None if it needs a package that is not installed here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if ours(error.name or ""):
            raise
        return None


def faults(tree: ast.Module) -> Iterator[str]:
    """Yield lines that import what a module of ours lacks, or read it as an attribute."""
    modules, nodes = dict[str, ModuleType | None](), [*ast.walk(tree)]
    for node in nodes:
        try:
            if isinstance(node, ast.Import):
                found = {a.asname or "": loaded(a.name) for a in node.names if ours(a.name)}
                modules |= found
            elif isinstance(node, ast.ImportFrom) and not node.level and ours(node.module or ""):
                module = loaded(node.module or "")
                for alias in node.names:
                    value = getattr(module, alias.name, None)
                    if module is not None and not hasattr(module, alias.name):
                        value = loaded(f"{node.module}.{alias.name}")
                    if isinstance(value, ModuleType):
                        modules[alias.asname or alias.name] = value
        except ModuleNotFoundError as error:
            yield f"line {node.lineno}: {error.name}"
    # A name that the file also gives to something else is not followed.
    stored = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored |= {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = None if node.value.id in stored else modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                yield f"line {node.lineno}: {module.__name__}.{node.attr}"


def test_names_are_there() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in FILES
        if (lines := list(faults(ast.parse(path.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("from jaxspec.engine import gone", ["line 1: jaxspec.engine.gone"]),
        ("def f():\n    from jaxspec.gone import x", ["line 2: jaxspec.gone"]),
        ("from tests.tiny import loops\nloops.gone()", ["line 2: tests.tiny.loops.gone"]),
        ("import eval.tables as t\nt.main\nt.gone", ["line 3: eval.tables.gone"]),
        ("from train import prompts\ndef f(prompts): prompts.gone", []),
    ],
)
def test_a_name_that_is_gone_is_found(source: str, lines: list[str]) -> None:
    assert list(faults(ast.parse(source))) == lines
