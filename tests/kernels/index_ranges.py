"""Ranges of the integers of a kernel at one launch, by interval arithmetic on its TTIR.

It finds integers on the way to an address that may overflow: kernels compute in 32 bits whatever they did
not cast, and wrap in silence. Ranges start from the launch's grid and arguments. An integer that a kernel
loads (a token, a document, an expert) is assumed to be at most `most`, and at least `LEAST` (ignored labels,
unused entries); sums of them too, since they count tokens. Bits of floats, and loaded integers of 8 or 16
bits, have no range, nor do results that depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Range = tuple[int, int] | None  # None: unknown, or not an integer
LEAST = -128

_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_OPERATION = re.compile(r'(?:(%[\w.$-]+)(?::(\d+))? = )?"?([a-z_]+\.[a-z_.0-9]+)"?(.*)')


@dataclass
class Node:
    """An operation: its text, its regions, and the text after the last of them."""

    text: str
    regions: list[list[Node]] = field(default_factory=list)
    end: str = ""


def parse(ttir: str) -> Node:
    """The kernel's function."""
    root = Node("", [[]])
    open_nodes = [root]
    for line in map(str.strip, ttir.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("}"):
            if re.match(r"\} (else|do) \{", line):
                open_nodes[-1].regions.append([])
            else:
                open_nodes.pop().end = line
            continue
        node = Node(line)
        open_nodes[-1].regions[-1].append(node)
        if re.sub(r" loc\(.*\)$", "", line).endswith("{"):
            node.regions.append([])
            open_nodes.append(node)
    (module,) = (node for node in root.regions[0] if node.text.startswith("module"))
    (function,) = (node for node in module.regions[0] if " public " in node.text)
    return function


class Ranges:
    """The ranges of one launch.

    Attributes:
        faults: overflows of integers that reach an address, as text.
    """

    def __init__(self, ttir: str, grid: tuple[int, int, int], arguments: dict[str, int], most: int):
        self.grid, self.most = grid, most
        self.ranges: dict[str, Range] = {}
        self.sources: dict[str, set[str]] = {}  # the values from which a value comes
        self.addresses: set[str] = set()
        self.overflows: dict[str, str] = {}
        self._places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))
        function = parse(ttir)
        for name, kind in re.findall(r"%([\w.]+): (i\d+)", function.text):
            value = arguments.get(name)  # descriptors' sizes and strides have no name of their own
            self.ranges[f"%{name}"] = self._loaded(kind) if value is None else (value, value)
        self._block(function.regions[0])
        self.faults = sorted({self.overflows[value] for value in self._reaching() & self.overflows.keys()})

    def _reaching(self) -> set[str]:
        """The values from which addresses are computed."""
        found, new = set(), set(self.addresses)
        while new:
            found |= new
            new = {source for value in new for source in self.sources.get(value, ())} - found
        return found

    def _block(self, nodes: list[Node]) -> list[str]:
        """Run a region; the values that it yields."""
        yielded: list[str] = []
        for node in nodes:
            match = _OPERATION.match(node.text if node.regions else re.sub(r" loc\(.*$", "", node.text))
            if match is None:
                continue
            name, count, kind, rest = match.groups()
            names = [] if name is None else [f"{name}#{i}" for i in range(int(count))] if count else [name]
            if kind in ("scf.yield", "scf.condition"):
                yielded = _VALUE.findall(rest.split(" : ")[0])[kind == "scf.condition" :]
            elif kind == "scf.for":
                self._loop(node, names)
            elif kind == "scf.if":
                branches = [self._block(region) for region in node.regions]
                for result, *values in zip(names, *branches, strict=False) if names else ():
                    self._set(result, _union(*map(self.ranges.get, values)), values)
            elif kind == "scf.while":
                self._while(node, names)
            elif kind in ("tt.reduce", "tt.scan"):
                self._reduce(node, names, _VALUE.findall(rest.split(")")[0]))
            else:
                self._operation(names, kind, rest, node)
        return yielded

    def _set(self, name: str, found: Range, sources: list[str]) -> None:
        self.ranges[name] = found
        self.sources.setdefault(name, set()).update(sources)

    def _loop(self, node: Node, names: list[str]) -> None:
        head = re.search(
            r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)(?: iter_args\((.*?)\) -> \((.*?)\)\s+:|\s+:)",
            node.text,
        )
        assert head is not None, node.text
        index, low, high, step = head.groups()[:4]
        carried = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", head[5] or "")
        first, last, by = (self.ranges.get(value) for value in (low, high, step))
        trips = 1
        if first is None or last is None:
            self._set(index, None, [low, high])
        else:
            self._set(index, (first[0], max(first[0], last[1] - 1)), [low, high])
            trips = max(1, -(-(last[1] - first[0]) // max(1, by[0] if by else 1)))
        start = [self.ranges.get(value) for _, value in carried]
        for (inside, value), found in zip(carried, start, strict=True):
            self._set(inside, found, [value])
        once = self._block(node.regions[0])
        # What one pass adds, every earlier pass may have added.
        kinds = _types(head[6] or "")
        for (inside, _), before, value, kind in zip(carried, start, once, kinds, strict=True):
            after, found = self.ranges.get(value), None
            if before is not None and after is not None:
                down, up = min(0, after[0] - before[0]), max(0, after[1] - before[1])
                found = before[0] + (trips - 1) * down, before[1] + (trips - 1) * up
            self._set(inside, self._checked(inside, found, _bits(kind), node, "carried by a loop"), [value])
        yielded = self._block(node.regions[0])
        for result, (inside, _), value in zip(names, carried, yielded, strict=True):
            whole = _union(self.ranges.get(inside), self.ranges.get(value))
            self._set(result, whole, [inside, value])

    def _while(self, node: Node, names: list[str]) -> None:
        """Whatever it carries is taken for a loaded integer."""
        kinds = re.search(r"\) : \((.*?)\) -> ", node.text)
        assert kinds is not None, node.text
        carried = re.findall(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)", node.text.split(" : ")[0])
        for (inside, value), kind in zip(carried, _types(kinds[1]), strict=True):
            self._set(inside, self._loaded(kind), [value])
        passed = self._block(node.regions[0])
        for inside, value in zip(re.findall(r"(%[\w.$-]+):", node.regions[1][0].text), passed, strict=True):
            self._set(inside, self.ranges.get(value), [value])
        yielded = self._block(node.regions[1])
        for (inside, _), value in zip(carried, yielded, strict=True):
            self.sources[inside].add(value)
        for result, value in zip(names, passed, strict=True):
            self._set(result, self.ranges.get(value), [value])

    def _reduce(self, node: Node, names: list[str], operands: list[str]) -> None:
        combines = " ".join(inner.text for inner in node.regions[0])
        for result, operand in zip(names, operands, strict=True):
            found = self.ranges.get(operand)
            if found is not None and "arith.addi" in combines:
                found = LEAST if found[0] < 0 else 0, self.most
            self._set(result, found, [operand])

    def _operation(self, names: list[str], kind: str, rest: str, node: Node) -> None:
        operands = _VALUE.findall(rest)
        if kind == "tt.addptr":
            self.addresses.add(operands[1])
        elif kind.startswith("tt.descriptor_"):
            self.addresses.update(_VALUE.findall(rest.split("[")[1].split("]")[0]))
        if len(names) != 1:
            return
        (name,) = names
        bits = _bits(re.split(r" -> | to | : ", rest)[-1])
        if bits is None or bits == 1:
            self._set(name, None if bits is None else (0, 1), [])
            return
        if kind == "arith.select":
            operands = operands[1:]
        elif kind == "tt.load" or kind.startswith("tt.atomic"):
            operands = []
        given = [self.ranges.get(operand) for operand in operands]
        found: Range = None
        if kind == "arith.constant":
            numbers = [int(number) for number in re.findall(r"-?\d+", rest.split(" : ")[0])]
            found = min(numbers), max(numbers)
        elif kind in ("tt.get_program_id", "tt.get_num_programs"):
            size = self.grid["xyz".index(rest.split()[0])]
            found = (0, size - 1) if kind == "tt.get_program_id" else (size, size)
        elif kind == "tt.make_range":
            end, start = (int(n) for n in re.findall(r"(?:end|start) = (-?\d+)", rest))
            found = start, end - 1
        elif kind == "tt.load" or kind.startswith("tt.atomic"):
            found = self._loaded(f"i{bits}")
        elif kind in _RULES and None not in given:
            found = _RULES[kind](*given)
        described = f"{kind} of {' and '.join(map(str, given))}"
        self._set(name, self._checked(name, found, bits, node, described), operands)

    def _checked(self, name: str, found: Range, bits: int | None, node: Node, described: str) -> Range:
        if (
            found is None
            or bits is None
            or bits < 32
            or -(1 << bits - 1) <= found[0] <= found[1] < 1 << bits - 1
        ):
            return found
        self.overflows[name] = f"{self._where(node)}: {described}"
        return None

    def _loaded(self, kind: str) -> Range:
        return (LEAST, self.most) if _bits(kind) in (32, 64) else None

    def _where(self, node: Node) -> str:
        """Files and lines, from the innermost call."""
        match = re.search(r"loc\((#loc\d*)\)", node.end or node.text)
        text = match[1] if match else ""
        while known := re.search(r"#loc\d*", text):
            text = text[: known.start()] + self._places.get(known[0], "") + text[known.end() :]
        lines = re.findall(r'"[^"]*?([\w-]+/[\w-]+\.py)":(\d+)', text)
        return " < ".join(f"{file}:{line}" for file, line in lines)


def _union(*ranges: Range) -> Range:
    known = [found for found in ranges if found is not None]
    return (
        (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(ranges) else None
    )


def _corners(function: Callable[[int, int], int]) -> Callable[..., Range]:
    """The range of a function that is monotonic in each operand."""

    def found(a: tuple[int, int], b: tuple[int, int]) -> Range:
        values = [function(x, y) for x in a for y in b]
        return min(values), max(values)

    return found


def _quotient(x: int, y: int) -> int:
    return (abs(x) // y) * (1 if x >= 0 else -1)


def _remainder(a: tuple[int, int], b: tuple[int, int]) -> Range:
    least = -max(b[1] - 1, 0) if a[0] < 0 else 0
    return max(a[0], least), min(max(a[1], 0), max(b[1] - 1, 0))


def _shifted(function: Callable[[int, int], int]) -> Callable[..., Range]:
    def found(a: tuple[int, int], b: tuple[int, int]) -> Range:
        return _corners(function)(a, b) if 0 <= b[0] <= b[1] < 64 else None

    return found


def _and(a: tuple[int, int], b: tuple[int, int]) -> Range:
    tops = [high for low, high in (a, b) if low >= 0]
    return (0, min(tops)) if tops else None


def _same(a: tuple[int, int], *_: Range) -> Range:
    return a


_RULES: dict[str, Callable[..., Range]] = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": _corners(lambda x, y: x * y),
    "arith.divsi": lambda a, b: _corners(_quotient)(a, (max(b[0], 1), max(b[1], 1))),
    "arith.remsi": _remainder,
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.select": _union,
    "arith.andi": _and,
    "arith.shli": _shifted(lambda x, y: x << y),
    "arith.shrsi": _shifted(lambda x, y: x >> y),
    "arith.extui": lambda a: a if a[0] >= 0 else None,
    **dict.fromkeys(("arith.extsi", "arith.trunci", "tt.splat", "tt.broadcast", "tt.expand_dims"), _same),
    **dict.fromkeys(("tt.reshape", "tt.trans"), _same),
}


def _bits(kind: str) -> int | None:
    match = re.search(r"(?:^|[x<\s])i(1|8|16|32|64)>?$", kind.strip())
    return int(match[1]) if match else None


def _types(text: str) -> Iterator[str]:
    """Types separated by commas, some of which have commas."""
    yield from (part for part in re.split(r", (?![^<]*>)", text) if part)
