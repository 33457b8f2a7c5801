"""ARCHITECTURE.md names files and calls that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
ROW = re.compile(r"^\| `(services/[^`]+)` \| ([^|]+) \|", re.MULTILINE)
STEPS = [
    (path, call) for path, calls in ROW.findall(TEXT) for call in re.findall(r"`([^`]+)`", calls)
]


def test_every_path_that_is_named_is_there() -> None:
    paths = re.findall(r"`((?:services|simulator|lab|bench)/[^`\s]*)`", TEXT)
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("path", "call"), [step for step in STEPS if step[0].endswith(".py")])
def test_every_step_of_a_walk_is_in_its_file(path: str, call: str) -> None:
    assert call in functions_of(path)


def test_every_call_in_a_diagram_is_a_step_of_its_walk() -> None:
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    drawn = [re.findall(r"\b[A-Z]\w+\.\w+", diagram) for diagram in diagrams]
    known = {call for _, call in STEPS}

    assert [len(calls) > 5 for calls in drawn] == [True] * 3
    assert [call for calls in drawn for call in calls if call not in known] == []


@cache
def functions_of(path: str) -> frozenset[str]:
    """Return the functions of a module, methods as `Class.method`."""
    tree = ast.parse((ROOT / path).read_text())
    classes = [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        f"{prefix}{node.name}"
        for prefix, body in [("", tree.body), *classes]
        for node in body
        if isinstance(node, functions)
    )
