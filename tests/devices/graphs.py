"""Read the graph that MindSpore hands to a device's backend: the last `validate` file of `save_graphs=2`."""

import re
from dataclasses import dataclass
from pathlib import Path

_OP = re.compile(r"  %\S+ = (?:PrimFunc_)?(\w+)\((.*)")
_SUBGRAPH = re.compile(r"subgraph @(\S+?)\((.*)")
_PARAMETER = re.compile(r"%para\d+_(\S+): (<.*>)\s*:")
_TENSOR = re.compile(r"Tensor\[(\w+)\]\]?, \(([^)]*)\)")
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "AllToAll")


@dataclass(frozen=True)
class Op:
    """One operator: its name, the subgraph it is in, the types that go in and come out, and what it belongs to.

    Types are (dtype, shape) pairs, such as ("Float32", "16, 8"); a scalar's shape is "".
    """

    name: str
    subgraph: str
    inputs: tuple
    outputs: tuple
    scope: str


@dataclass(frozen=True)
class Graph:
    """A whole graph: its operators, and its inputs and Parameters by name with their text."""

    entry: str
    ops: tuple
    parameters: dict

    def count(self, *names: str, where: str = "everywhere") -> int:
        """Return how many operators have one of the names: "everywhere", in the "entry" graph or in "branches"."""
        places = {"everywhere": lambda op: True, "entry": self.in_entry, "branches": lambda op: not self.in_entry(op)}
        return sum(op.name in names and places[where](op) for op in self.ops)

    def in_entry(self, op: Op) -> bool:
        """Return whether an operator runs at every call."""
        return op.subgraph == self.entry

    def dtypes(self) -> set:
        """Return the dtypes of all Tensors of one dimension or more that an operator takes or gives."""
        return {dtype for op in self.ops for dtype, shape in (*op.inputs, *op.outputs) if shape}


def read(folder: Path) -> Graph:
    """Return the graph that was dumped last into `folder`."""
    dumps = sorted(folder.rglob("*_validate_*.ir"))
    return parse(dumps[-1].read_text(encoding="utf-8"))


def parse(text: str) -> Graph:
    """Return the graph that a dump describes."""
    entry = re.search(r"# IR entry: @(\S+)", text)
    subgraph, lines, ops = "", text.splitlines(), []
    for number, line in enumerate(lines):
        header = _SUBGRAPH.match(line)
        if header:
            subgraph = header.group(1)
        found = _OP.match(line)
        if found:
            given, _, result = lines[number + 1].partition(" -> ")
            scope = lines[number + 2].partition("Fullname with scope: ")[2].strip("()")
            ops.append(Op(found.group(1), subgraph, _types(given), _types(result), scope))
    parameters = {match.group(1): match.group(2) for match in map(_PARAMETER.match, lines) if match}
    return Graph(entry.group(1) if entry else "", tuple(ops), parameters)


def _types(text: str) -> tuple:
    return tuple(_TENSOR.findall(text))
