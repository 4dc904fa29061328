"""Count the operators of a step for Ascend, ours beside MindSpore's, and write them into docs/performance.md.

python -m tests.devices.op_counts
"""

import tempfile
from pathlib import Path

from tests.devices import compiling, stand_ins

PAGE = compiling.ROOT / "docs/performance.md"
START, END = "<!-- operators: make op-counts -->", "<!-- end of operators -->"
NAMES = ("120 parameters, stock", "120 parameters")
# What the backend does not run, or runs at no cost.
NO_OPERATORS = {"Depend", "Load", "MakeTuple", "TupleGetItem", "UpdateState", "Partial", "Switch"}


def table(stock, ours) -> str:
    """Return the counts of both graphs: at every call, and in the branches."""
    lines = ["| operator | MindSpore, every call | here, every call | MindSpore, branches | here, branches |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for name in sorted({op.name for graph in (stock, ours) for op in graph.ops} - NO_OPERATORS):
        counts = [graph.count(name, where=where) for where in ("entry", "branches") for graph in (stock, ours)]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    """Compile both steps and replace the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stand_ins.build(folder / "stand_ins")
        compiled = compiling.compile_in_process(folder / "stand_ins", folder, NAMES, "Ascend", 1, {})
        counts = table(*[compiled[name].graph for name in NAMES])
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(f"{before}{START}\n\n{counts}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(f"Wrote {PAGE}.")


if __name__ == "__main__":
    main()
