"""`python -m bench.gpu.cell JSON`: run one cell in this process; the last line is its result."""

import json
import sys
from typing import Any

from bench.gpu.cells import DEVICE_PARTS, Cell

RESULT = "RESULT "


def main() -> None:
    print(RESULT + json.dumps(run(Cell(**json.loads(sys.argv[1])))))


def run(cell: Cell) -> dict[str, Any]:
    """Return the cell's rows, and what it ran on."""
    if cell.part not in DEVICE_PARTS:
        from bench.gpu import engine

        return engine.run(engine.EngineCell(device=cell.device, **cell.options))
    from bench.gpu import costs, link, order, overlap, pinning
    from bench.gpu.machine import make_machine

    measures: dict[str, Any] = {
        "order": order.order,
        "link": link.link,
        "overlap": overlap.overlap,
        "loads": costs.loads,
        "marks": costs.marks,
        "small": costs.small_copies,
        "pinning": pinning.memlock if cell.name == "memlock" else pinning.pinning,
    }
    machine = make_machine(cell.device)
    return {"device": machine.name, "rows": measures[cell.part](machine, **cell.options)}


if __name__ == "__main__":
    main()
