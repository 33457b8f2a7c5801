"""Finished cells as files, named by what they depend on: the cell's inputs and the code."""

import hashlib
import json
from dataclasses import asdict
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from simulator.comparison.grid import Cell, CellResult

ROOT = Path(__file__).resolve().parents[2]
# Whose code decides what a cell answers.
SOURCES = (
    "simulator",
    "services/placement",
    "services/pacing",
    "services/planner",
    "services/control",
)


@cache
def code_version() -> str:
    """Return a hash of all code and data files that a run depends on, but for a policy's own."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _policy_version(policy: str) -> str:
    """Return a hash of the module of a `module:attribute`, and of those beside it."""
    digest = hashlib.sha256()
    module, colon, _ = policy.partition(":")
    spec = find_spec(module) if colon else None
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cell_key(cell: Cell) -> str:
    """Return a hash of the cell's inputs and of the code. Its label is no input."""
    inputs = asdict(cell)
    del inputs["label"]
    text = json.dumps(inputs, sort_keys=True, default=_plain)
    versions = f"{code_version()}\n{_policy_version(cell.policy)}"
    return hashlib.sha256(f"{versions}\n{text}".encode()).hexdigest()


def _plain(value: object) -> str:
    assert isinstance(value, Enum), value
    return str(value.value)


class CellCache:
    """A folder of results. A file is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, cell: Cell) -> CellResult | None:
        """Return a finished cell's result; None if it has none, or its file cannot be read."""
        try:
            return CellResult(**json.loads(self._path(cell).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def put(self, cell: Cell, result: CellResult) -> None:
        path = self._path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".tmp")
        half.write_text(json.dumps(asdict(result)))
        half.replace(path)

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell_key(cell)}.json"
