"""Imports run downhill, and `import jaxspec` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent
# that one holds lazy names only
MODULES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"})

# A module imports from its own stage and from those above it.
STAGES = (
    {"cluster", "command", "errors", "files", "plugins", "runtime", "typing"},
    {"config"},
    {"sharding", "cache", "sampling", "verification"},
    {"models"},
    {"prompts"},
    {"checkpoints", "data", "heads"},
    {"publishing"},
    {"loading"},
    {"decoding"},
    {"engine"},
    {"serve"},
    {"training"},
    {"cli"},
    {"__main__"},
)
STAGE = {part: number for number, parts in enumerate(STAGES) for part in parts}

# flax.nnx fails to import on some of the jax and flax pairs that the library runs on; TensorFlow is
# never needed at run time; torch is the oracle of the parity tests, and lists .bin; scripts sit
# above the library.
BANNED = (
    *("configs", "eval", "flax.nnx", "jaxspec_demo", "picturebook", "tensorflow", "tests"),
    *("torch", "train"),
)
EXCEPT: dict[tuple[str, ...], str] = {("checkpoints", "formats", "torch_files"): "torch"}

HEAVY = {
    *("jax", "flax", "numpy", "transformers", "PIL", "torch"),
    *("optax", "orbax", "grain", "tensorflow_datasets", "matplotlib"),
}


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a module of `package`, inside functions too, and
    of flax.nnx.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "flax.nnx":
            yield node.lineno, "flax.nnx"


def complaints(source: str, parts: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the imports of the module `jaxspec/<parts>.py` (or
    `<parts>/__init__.py`).
    """
    here = parts[0]
    package = ".".join(("jaxspec", *parts[:-1]))
    found = []
    for line, name in imported_names(ast.parse(source), package):
        head, _, rest = name.partition(".")
        if name in ("jaxspec", "jaxspec.__version__"):
            continue
        if head == "jaxspec":
            there = rest.partition(".")[0]
            if there not in STAGE:
                found.append(f"line {line}: {name}: import from the module that defines it")
            elif STAGE[there] > STAGE[here]:
                found.append(f"line {line}: {name}: `{there}` stands below `{here}`")
        elif EXCEPT.get(parts) != name and any(
            f"{name}.".startswith(f"{banned}.") for banned in BANNED
        ):
            found.append(f"line {line}: {name}: never inside the library")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_run_downhill(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    assert parts[0] in STAGE, f"give jaxspec/{parts[0]} a place in STAGES"
    assert complaints(path.read_text(), parts) == []


@pytest.mark.parametrize(
    "path", sorted((PACKAGE.parent / "eval" / "lib").rglob("*.py")), ids=lambda path: path.name
)
def test_what_scripts_share_imports_none_of_them(path: Path) -> None:
    names = [name for _, name in imported_names(ast.parse(path.read_text()), "eval.lib")]
    assert [
        name
        for name in names
        if name.startswith(("eval.", "train.")) and not name.startswith("eval.lib.")
    ] == []


def test_no_circle() -> None:
    """Imports make no circle of files, imports inside functions counted, nor of eval/ and the
    presets, which are made of its parts.
    """
    root = PACKAGE.parent
    files = [
        file
        for folder in ("jaxspec", "jaxspec_demo", "picturebook", "eval", "configs", "train")
        for file in (root / folder).rglob("*.py")
    ]
    names = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }
    del names["jaxspec"]  # lazy names only
    graph = {}
    for name, file in names.items():
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        found = [full for _, full in imported_names(ast.parse(file.read_text()), package)]
        graph[name] = {full if full in names else full.rpartition(".")[0] for full in found} & set(
            names
        )
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files
    assert [
        name
        for name in graph
        if name.startswith("eval.") and any(n.startswith("configs") for n in graph[name])
    ] == []


def test_names_are_imported_from_where_type_checkers_find_them() -> None:
    """What is imported from a module of the library is defined there, or in its `__all__`: to type
    checkers all other names that the module imports are private.
    """
    root, private = PACKAGE.parent, set[str]()
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        nodes = ast.parse(file.read_text()).body
        names = {a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names}
        for node in nodes:
            if ast.unparse(node).startswith("__all__"):
                names -= {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
        if file.stem == "__init__":
            names -= {path.stem for path in file.parent.glob("*")}
        private |= {f"{module}.{name}" for name in names}
    assert {
        name: file.relative_to(root).as_posix()
        for folder in ("jaxspec", "jaxspec_demo", "configs", "eval", "train", "tests")
        for file in (root / folder).rglob("*.py")
        for _, name in imported_names(ast.parse(file.read_text()), "")
        if name in private
    } == {}


def test_import_is_light() -> None:
    code = f"import sys, jaxspec; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", jaxspec.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(jaxspec, name) is not None
