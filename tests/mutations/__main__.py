"""Breaks one mechanism at a time and expects tests of `make test` to fail.

`python -m tests.mutations [NAME ...]` works on a copy of the tree, and ends with status 1 if a
mechanism could be broken unnoticed.
"""

import os
import shutil
import subprocess
import sys
import time

from tests.mutations import MUTATIONS
from tests.mutations.mutation import ROOT, Mutation

COPY = ROOT / ".cache" / "mutated"
TIMEOUT_S = 3_600.0  # a guard against hangs


def copy_tree() -> None:
    """Copy what git knows, as it is now; packages, models and references are shared."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for name in filter(os.path.exists, listed.decode().splitlines()):
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for stub in (ROOT / "protos").rglob("*_pb2*.py"):
        shutil.copy2(stub, COPY / stub.relative_to(ROOT))
    (COPY / ".cache").mkdir(exist_ok=True)
    for shared in ("models", "reference", "chart-tools"):
        (COPY / ".cache" / shared).symlink_to(ROOT / ".cache" / shared)


def is_noticed(mutation: Mutation) -> bool:
    """Break one line in the copy, run the tests, and mend it again."""
    path = COPY / mutation.file
    text = path.read_text()
    assert text.count(mutation.right) == 1, f"{mutation.name}: the line is not there once"
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        return run(mutation.tests) == 1
    finally:
        path.write_text(text)


def run(tests: tuple[str, ...]) -> int:
    """Return pytest's exit status: 1 if tests failed."""
    log = COPY / "pytest.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *tests],
            cwd=COPY,
            env=os.environ | {"PYTHONPATH": f"{COPY}{os.pathsep}{COPY / 'protos'}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert done.returncode in (0, 1), f"{tests}: see {log}"
    return done.returncode


def main() -> int:
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or m.name in sys.argv[1:]]
    copy_tree()
    unnoticed = []
    for mutation in chosen:
        begin_s = time.monotonic()
        noticed = is_noticed(mutation)
        unnoticed += [] if noticed else [mutation.name]
        verdict = "noticed" if noticed else "NOT NOTICED"
        print(f"{mutation.name:45} {verdict} ({time.monotonic() - begin_s:.0f} s)", flush=True)
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
