"""`python -m bench.gpu.cell JSON`: run one cell in this process; the last line is its result."""

import json
import sys
from typing import Any

from bench.gpu.engine import Cell, run

RESULT = "RESULT "


def main() -> None:
    request = json.loads(sys.argv[1])
    result: dict[str, Any]
    if request == {"kind": "link"}:
        from bench.gpu import link

        result = link.run()
    else:
        result = run(Cell(**request))
    print(RESULT + json.dumps(result))


if __name__ == "__main__":
    main()
