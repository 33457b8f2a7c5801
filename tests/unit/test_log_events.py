"""Every log event is provoked by a test that is marked with it, or left with a reason.

Events are found where loggers are called; a mark `logs` fails its test where they are not logged.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
LOGGERS = {"log", "logger"}

A_BUG = "only a mistake of ours brings it about: what it was shows in the exception beside it"
A_GPU = "only on a GPU"
A_PROCESS = "of a process that starts or ends, where its output is read by people"
UNPROVOKED = {
    "accounts_not_settled": A_BUG,
    "advised_sampling_left_out": "beside sampling without it: tests see that it is left out",
    "block_size_chosen": A_PROCESS,
    "block_tables_copied_in_every_step": A_GPU,
    "block_tables_kept_free": A_GPU,
    "certificates_not_read": "beside certificates that stay as they were: tests see that they do",
    "copies_left_behind": A_GPU,
    "delta_not_taken": A_BUG,
    "discovery_crashed": A_BUG,
    "engine_described": A_PROCESS,
    "engine_died": A_PROCESS,
    "executor_link_crashed": A_BUG,
    "executor_unreachable": "at debug level, as often as is tried",
    "group_joined": A_PROCESS,
    "group_not_joined": A_PROCESS,
    "http_crashed": A_BUG,
    "leader_lost": A_PROCESS,
    "loading_abandoned": A_PROCESS,
    "metrics_started": A_PROCESS,
    "beat_crashed": A_BUG,
    "moves_crashed": A_BUG,
    "nodes_not_gathered": A_PROCESS,
    "ranks_died": A_PROCESS,
    "reporting_crashed": A_BUG,
    "serving_interrupted": "beside a health that says so: tests see that it does",
    "side_groups": A_PROCESS,
    "stream_crashed": A_BUG,
    "tracker_lease_not_regained": "beside a lease that is asked for again: tests see that it is",
    "tracker_report_recovered": "beside counts that come after all: tests see that they do",
    "verdicts_lost": A_GPU,
}


@cache
def trees(folder: str, *words: str) -> tuple[ast.AST, ...]:
    """Return the modules of a folder in which one of the words is."""
    sources = (path.read_text() for path in (ROOT / folder).rglob("*.py"))
    return tuple(ast.parse(text) for text in sources if any(word in text for word in words))


def calls(tree: ast.AST) -> Iterator[tuple[ast.Attribute, ast.Call]]:
    """Yield the calls of something's method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func, node


def texts(node: ast.AST) -> set[str]:
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@cache
def logged() -> set[str]:
    """Return the events of all calls of loggers, whatever the level."""
    found: set[str] = set()
    for method, call in chain.from_iterable(map(calls, trees("services", "structlog"))):
        owner = method.value
        if method.attr in LEVELS and isinstance(owner, ast.Name) and owner.id in LOGGERS:
            found.update(*map(texts, call.args))
    return found


def marked() -> set[str]:
    """Return the events that tests are marked with."""
    found = chain.from_iterable(map(calls, trees("tests", "mark.logs(")))
    return set().union(*(texts(mark) for method, mark in found if method.attr == "logs"))


def provoked() -> set[str]:
    """Return the events that tests are marked with, or look for in what they capture."""
    looks = [
        node
        for tree in trees("tests", "capture_logs")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(isinstance(n, ast.Name) and n.id == "capture_logs" for n in ast.walk(node))
    ]
    return marked() | set().union(*map(texts, looks)) & logged()


def test_every_event_is_provoked_by_a_test_or_left_with_a_reason() -> None:
    assert len(logged()) > 50
    assert provoked() | UNPROVOKED.keys() == logged()
    assert provoked() & UNPROVOKED.keys() == set()


def test_no_mark_names_an_event_that_there_is_not() -> None:
    assert marked() <= logged()
