"""Collectives, copies and estimated cycles of a program that XLA optimised, by stage of a block.

The text is that of `compiled.as_text()`: computations, each a list of operations. An operation
names its origin (`op_name="jit(run_decode)/while/body/draft/..."`) and, on TPUs, the compiler's
estimate of its cycles.

A loop inside the block counts once for each turn. Of a condition only the cheapest branch counts,
which is the one that greedy decoding takes. Transfers between memories are not in the cycles.
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
_OPERATION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w\-]+)\("
)
_KERNELS = ("fusion", "custom-call", "copy", "transpose", "sort", "dot", "convolution")
_KERNELS += COLLECTIVES
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclass
class Cost:
    """The cost of one run of a computation, by stage; `other` is the cost outside all stages."""

    cycles: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of the results of collectives, and of the operands of asynchronous ones."""
    copied: Counter[str] = field(default_factory=Counter)
    """Bytes of arrays that are written again in another place or layout."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Operations that the device starts one by one: fusions, library calls, copies, messages."""

    def add(self, other: Cost, times: int = 1) -> None:
        """Add another computation that runs so many times."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update({key: times * value for key, value in theirs.items()})


@dataclass(frozen=True)
class ProgramText:
    """The text of an optimised program."""

    text: str

    @cached_property
    def computations(self) -> dict[str, list[str]]:
        """Return the operations of each computation, one per line."""
        found: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in self.text.splitlines():
            begin = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
            if begin and "->" in line:
                lines = found[begin[1]] = []
            elif line.startswith(" "):
                lines.append(line)
        return found

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
        place = lines.index(_loops(lines)[0])
        return sum(map(_copied, lines[:place])), sum(map(_copied, lines[place:]))

    def whole(self) -> Cost:
        """Return the program's cost, with each loop counted once."""
        return self._sum(self.entry)

    def _cost(self, name: str) -> Cost:
        if name not in self._known:
            self._known[name] = self._sum(self.computations[name])
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, Cost]:
        return {}

    def _sum(self, lines: list[str]) -> Cost:
        total, channels = Cost(), set()
        for line in lines:
            operation = _OPERATION.match(line)
            if operation is None:
                continue
            kind, stage = operation["kind"], _stage(line)
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            total.cycles[stage] += int(cycles[1]) if cycles else 0
            total.copied[stage] += _copied(line)
            total.kernels[stage] += kind.removesuffix("-start") in _KERNELS
            # A TPU's compiler lets a message begin, run and end in three fusions of one channel.
            for channel, made in self._messages(line, operation):
                if channel not in channels:
                    total.collectives[stage] += 1
                    total.sent[stage] += made
                channels |= {channel} - {None}
            if kind == "while":
                total.add(
                    self._cost(_called(line, "body")[0]), self._turns(_called(line, "condition")[0])
                )
            elif kind == "conditional":
                branches = map(
                    self._cost,
                    _called(line, "branch_computations|true_computation|false_computation"),
                )
                total.add(
                    min(branches, key=lambda cost: (cost.cycles.total(), cost.kernels.total()))
                )
            elif kind == "call":
                total.add(self._cost(_called(line, "to_apply")[0]))
        return total

    def _messages(self, line: str, operation: re.Match[str]) -> list[tuple[str | None, int]]:
        """Return channel and bytes of a message, or of the messages in a fusion."""
        kind = operation["kind"].removesuffix("-start")
        if kind == "fusion":
            inside = self.computations.get(_called(line, "calls")[0], ())
            return [
                one
                for inner in inside
                if (op := _OPERATION.match(inner))
                for one in self._messages(inner, op)
            ]
        if kind not in COLLECTIVES:
            return []
        channel = re.search(r"channel_id=(\d+)", line)
        return [(channel and channel[1], array_bytes(operation["type"]))]

    def _turns(self, condition: str) -> int:
        """Return the turns of a loop that counts up to a constant; 1 if there is no number."""
        numbers = re.findall(
            r"s32\[\]\S* constant\((\d+)\)", "\n".join(self.computations[condition])
        )
        return int(numbers[0]) if len(numbers) == 1 else 1


def _loops(lines: list[str]) -> list[str]:
    return [line for line in lines if " while(" in line]


def _called(line: str, role: str) -> list[str]:
    """Return the computations that an operation calls in a role, such as `body`."""
    found = re.findall(rf"\b(?:{role})=(\{{[^}}]*\}}|%?[\w.\-]+)", line)
    return [name.lstrip("%") for part in found for name in re.findall(r"%?[\w.\-]+", part)]


def _stage(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return (
        next((part for part in name[1].split("/") if part in STAGES), "other") if name else "other"
    )


def _copied(line: str) -> int:
    """Return the bytes that an operation copies; 0 if it computes or moves between memories."""
    operation = _OPERATION.match(line)
    if operation is None or "S(1)" in operation["type"]:
        return 0
    again = operation["kind"] in ("copy", "transpose") or (
        operation["kind"] == "fusion" and re.match(r"(copy|transpose|bitcast)_", operation["name"])
    )
    return array_bytes(operation["type"]) if again else 0


def array_bytes(text: str) -> int:
    """Return the bytes of the arrays in a type.

    >>> array_bytes("(f32[2,3]{1,0}, bf16[4])")
    32
    """
    found = _ARRAY.findall(text)
    return sum(
        _BYTES.get(kind, 4) * math.prod(map(int, filter(None, shape.split(","))))
        for kind, shape in found
    )
