"""Count bytes, collectives and estimated cycles of a program that XLA optimised, by stage of a
block.

The text is that of `compiled.as_text()`: computations, each a list of operations. An operation
names its origin (`op_name="jit(run_decode)/while/body/draft/..."`) and, on TPUs, the compiler's
estimate of its cycles.

A loop inside the block counts once for each turn. Of a condition only the cheapest branch counts,
which is the one that greedy decoding takes.

Bytes are those that move from and to main memory: weights, caches and large activations, which a
layout without a memory space S(n) marks. What an operation only slices or gathers counts as far as
it is taken, and an array that is updated in place by its update. An operation's cycles hold its
wait for operands in main memory, but not the transfers that run next to other operations (`copy-
start`). So two programs of equal bytes may differ in cycles, by what XLA prefetches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
STAGES = ("draft", "extend", "verify", "commit")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_STILL = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all")
_STILL += ("while", "conditional", "call", "opt-barrier", "partition-id", "replica-id")
"""Operations that move nothing themselves."""
_BITCASTS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
"""Calls of a TPU's compiler that move nothing."""
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""Operations that update their first operand in place, and the index of the operand it gets."""
_OPERATION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w\-]+)\("
)
_KERNELS = ("fusion", "custom-call", "copy", "transpose", "sort", "dot", "convolution")
_KERNELS += COLLECTIVES
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")


Taken = tuple[dict[int, int | None], dict[int, int]]
"""Bytes that a fusion reads of its operands, and updates of them, by place; None is all of one."""


@dataclass
class Cost:
    """Hold the cost of one run of a computation, by stage; `other` is the cost outside all
    stages.
    """

    cycles: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of the results of collectives, and of the operands of asynchronous ones."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes of arrays that are written again in another place or layout."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that are read from main memory or written to it."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Operations that the device starts one by one: fusions, library calls, copies, messages."""

    def add(self, other: Cost, times: int = 1) -> None:
        """Add another computation that runs so many times."""
        for mine, other_value in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update({key: times * value for key, value in other_value.items()})


@dataclass(frozen=True)
class ProgramText:
    """Read the text of an optimised program."""

    text: str
    _known: dict[str, Cost] = field(default_factory=dict, init=False, compare=False, repr=False)
    _fused: dict[str, Taken] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def computations(self) -> dict[str, list[str]]:
        """Return the operations of each computation, one per line."""
        bodies: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in self.text.splitlines():
            begin = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
            if begin and "->" in line:
                lines = bodies[begin[1]] = []
            elif line.startswith(" "):
                lines.append(line)
        return bodies

    @property
    def entry(self) -> list[str]:
        """Return the operations of the program itself."""
        (name,) = re.findall(r"^ENTRY %?([\w.\-]+) ", self.text, re.MULTILINE)
        return self.computations[name]

    def block(self) -> Cost:
        """Return the cost of one turn of the program's loop, or of its loop that drafts."""
        turns = (self._cost(_called(loop, "body")[0]) for loop in _loops(self.entry))
        return max(turns, key=lambda cost: (cost.kernels["draft"], cost.kernels.total()))

    def around(self) -> tuple[int, int]:
        """Return the bytes that are copied before the program's first loop, and after it."""
        lines = self.entry
        start = lines.index(_loops(lines)[0])
        return sum(map(_copied, lines[:start])), sum(map(_copied, lines[start:]))

    def whole(self) -> Cost:
        """Return the program's cost, with each loop counted once."""
        return self._sum(self.entry)

    def _cost(self, name: str) -> Cost:
        if name not in self._known:
            self._known[name] = self._sum(self.computations[name])
        return self._known[name]

    def _sum(self, lines: list[str]) -> Cost:
        """Add up the costs of a computation's operations, and of those that they call."""
        total, types = Cost(), _types(lines)
        carried: dict[str, set[str | None]] = {}
        """Channels of the messages that a fusion runs, by the names of its results."""
        for line in lines:
            operation = _OPERATION.match(line)
            if operation is None:
                continue
            kind, stage = operation["kind"], _stage(line)
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            total.cycles[stage] += int(cycles[1]) if cycles else 0
            total.copied[stage] += _copied(line)
            total.moved[stage] += self._moved(operation, types)
            total.kernels[stage] += kind.removesuffix("-start") in _KERNELS
            # A TPU's compiler lets a message begin, run and end in three fusions of one channel, of
            # which each reads the one before. Equal layers have one channel too.
            operands = (carried.get(name, set()) for name in _operands(operation))
            open_channels = set().union(*operands)
            messages = self._messages(line, operation)
            for channel, produced in messages:
                if channel not in open_channels:
                    total.collectives[stage] += 1
                    total.sent[stage] += produced
            if kind.startswith("fusion"):
                carried[operation["name"]] = {channel for channel, _ in messages} - {None}
            elif kind in ("get-tuple-element", "tuple"):
                carried[operation["name"]] = open_channels
            if kind == "while":
                body, condition = (_called(line, role)[0] for role in ("body", "condition"))
                total.add(self._cost(body), self._turns(condition))
            elif kind == "conditional":
                roles = "branch_computations|true_computation|false_computation"
                costs = map(self._cost, _called(line, roles))
                total.add(min(costs, key=lambda cost: (cost.cycles.total(), cost.kernels.total())))
            elif kind == "call":
                total.add(self._cost(_called(line, "to_apply")[0]))
        return total

    def _moved(self, operation: re.Match[str], types: dict[str, str]) -> int:
        """Return the bytes that an operation moves from and to main memory."""
        kind, produced = operation["kind"], operation["type"]
        target = re.search(r'custom_call_target="(\w+)"', operation.string)
        if kind in _STILL or kind.endswith("-done") or (target and target[1] in _BITCASTS):
            return 0
        operands = [types.get(name, "") for name in _operands(operation)]
        sizes = [main_bytes(text) for text in operands]
        if kind in ("copy-start", "slice-start"):
            # A copy makes (destination, source, flag), a slice ((source), destination, flag).
            arrays = [array[0] for array in _ARRAY.finditer(produced)]
            moved = arrays[0 if kind == "copy-start" else -2]
            return (array_bytes(moved) if sizes[0] else 0) + main_bytes(moved)
        if kind.endswith("-start"):
            return 2 * sum(sizes)
        written, inputs = main_bytes(produced), list(sizes)
        if kind in _SLICES:
            inputs[0] = min(sizes[0], array_bytes(produced))
        elif kind in _UPDATES:
            inputs[0], written = 0, array_bytes(operands[_UPDATES[kind]]) if written else 0
        elif kind == "fusion":
            parts, updates = self._taken(_called(operation.string, "calls")[0])
            for i, part in parts.items():
                inputs[i] = sizes[i] if part is None else min(sizes[i], part)
            written += sum(updated - sizes[i] for i, updated in updates.items() if sizes[i])
        return sum(inputs) + max(written, 0)

    def _taken(self, name: str) -> Taken:
        """Return what a fused computation takes of its operands, and updates in place."""
        if name not in self._fused:
            self._fused[name] = self._parts(self.computations.get(name, []))
        return self._fused[name]

    def _parts(self, lines: list[str]) -> Taken:
        """Return what the operations of a fusion take and update."""
        types = _types(lines)
        parameters: dict[str, int] = {}
        """Number of the parameter that a name is, if only in another shape."""
        parts: dict[int, int | None] = {}
        updates: dict[int, int] = {}
        for operation in filter(None, map(_OPERATION.match, lines)):
            kind, name, operands = operation["kind"], operation["name"], _operands(operation)
            if kind == "parameter":
                parameters[name] = int(operation.string[operation.end() :].partition(")")[0])
                parts[parameters[name]] = 0
                continue
            called = _called(operation.string, "calls")[0] if kind == "fusion" else ""
            if (kind == "bitcast" or self._reshapes(called)) and operands[0] in parameters:
                parameters[name] = parameters[operands[0]]
            else:
                inner = self._taken(called) if called else ({}, {})
                for i, operand in enumerate(operands):
                    parameter = parameters.get(operand)
                    if parameter is None:
                        continue
                    part: int | None = inner[0].get(i)
                    if i == 0 and kind in _SLICES:
                        part = array_bytes(operation["type"])
                    elif i == 0 and kind in _UPDATES:
                        part = 0
                        updates[parameter] = array_bytes(types.get(operands[_UPDATES[kind]], ""))
                    elif i in inner[1]:
                        updates[parameter] = inner[1][i]
                    before = parts[parameter]
                    parts[parameter] = None if part is None or before is None else before + part
            if name in parameters and operation[0].lstrip().startswith("ROOT"):
                parts[parameters[name]] = None
        return parts, updates

    def _reshapes(self, name: str) -> bool:
        """Return whether a fused computation makes nothing but another shape of its operand."""
        operations = map(_OPERATION.match, self.computations.get(name, []))
        kinds = [operation["kind"] for operation in operations if operation]
        return kinds.count("parameter") == 1 and set(kinds) == {"parameter", "bitcast"}

    def _messages(self, line: str, operation: re.Match[str]) -> list[tuple[str | None, int]]:
        """Return channel and bytes of a message, or of the messages in a fusion."""
        kind = operation["kind"].removesuffix("-start")
        if kind == "fusion":
            inside = self.computations.get(_called(line, "calls")[0], ())
            return [
                message
                for inner in inside
                if (op := _OPERATION.match(inner))
                for message in self._messages(inner, op)
            ]
        if kind not in COLLECTIVES:
            return []
        channel = re.search(r"channel_id=(\d+)", line)
        return [(channel and channel[1], array_bytes(operation["type"]))]

    def _turns(self, condition: str) -> int:
        """Return the turns of a loop that counts up to a constant; 1 if there is no number."""
        text = "\n".join(self.computations[condition])
        numbers = re.findall(r"s32\[\]\S* constant\((\d+)\)", text)
        return int(numbers[0]) if len(numbers) == 1 else 1


def _loops(lines: list[str]) -> list[str]:
    return [line for line in lines if " while(" in line]


def _called(line: str, role: str) -> list[str]:
    """Return the computations that an operation calls in a role, such as `body`."""
    names = re.findall(rf"\b(?:{role})=(\{{[^}}]*\}}|%?[\w.\-]+)", line)
    return [name.lstrip("%") for part in names for name in re.findall(r"%?[\w.\-]+", part)]


def _types(lines: list[str]) -> dict[str, str]:
    """Return the type of each operation by its name."""
    return {match["name"]: match["type"] for match in map(_OPERATION.match, lines) if match}


def _operands(operation: re.Match[str]) -> list[str]:
    """Return the names of an operation's operands."""
    depth, text = 1, operation.string[operation.end() :]
    for end, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return re.findall(r"%([\w.\-]+)", text[:end])
    return []


def _stage(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    parts = name[1].split("/") if name else []
    return next((part for part in parts if part in STAGES), "other")


_REWRITES = re.compile(r"(copy|transpose)_|bitcast_fusion")
"""Names of fusions that write an array again; `bitcast_select_fusion` computes one."""


def _copied(line: str) -> int:
    """Return the bytes that an operation copies; 0 if it computes or moves between memories."""
    operation = _OPERATION.match(line)
    if operation is None or "S(1)" in operation["type"]:
        return 0
    again = operation["kind"] in ("copy", "transpose") or (
        operation["kind"] == "fusion" and _REWRITES.match(operation["name"])
    )
    return array_bytes(operation["type"]) if again else 0


def array_bytes(text: str) -> int:
    """Return the bytes of the arrays in a type.

    >>> array_bytes("(f32[2,3]{1,0}, bf16[4])")
    32
    """
    return sum(
        _BYTES.get(kind, 4) * math.prod(map(int, filter(None, shape.split(","))))
        for kind, shape, _ in _ARRAY.findall(text)
    )


def main_bytes(text: str) -> int:
    """Return the bytes of a type's arrays that lie in main memory.

    >>> main_bytes("(f32[2,3]{1,0:T(8,128)S(1)}, bf16[4]{0})")
    8
    """
    arrays = _ARRAY.finditer(text)
    return sum(array_bytes(array[0]) for array in arrays if "S(" not in (array[3] or ""))
