"""`python -m bench.who_runs.replay FILE`: make an engine's logged run decisions again.

Exit code 1 if a decision is another one.
"""

import sys
from pathlib import Path

from services.control.run_log import replay


def main() -> None:
    path = Path(sys.argv[1])
    different = replay(path)
    for number in different:
        print(f"{path}:{number}: decided differently")
    print(f"{path}: {len(different)} decisions are others")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
