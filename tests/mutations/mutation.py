"""One line of one file, broken."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXECUTOR = "services/executor"
CONTROL = "services/control"


@dataclass(frozen=True)
class Mutation:
    """A line, and the tests of `make test` that notice when it is another one."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]  # arguments of pytest
