"""What holds the KV of a gateway's executors: classes, requests and sessions, the largest first."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from cli.client.endpoint import Endpoint

MAX_ROWS = 30  # of requests that are shown, and of sessions
UNKNOWN = "?"
NONE = "-"
USE = ("pool", "host", "shared", "again")

Holders: TypeAlias = Mapping[str, Any]  # the answer of `GET /v1/evenflow/kv`
Entry: TypeAlias = Mapping[str, Any]


def read_holders(endpoint: Endpoint) -> Holders:
    """Return what a gateway says of now. Raises AnswerError."""
    path = f"/v1/evenflow/kv?limit={MAX_ROWS}"
    return endpoint.of_gateway(path, "executors", "shares", "requests", "sessions")


def holders_picture(holders: Holders) -> RenderableType:
    """Return four tables; tokens are of all layers."""
    return Group(
        _executors(holders["executors"]),
        _shares(holders["shares"]),
        _requests(holders["requests"]),
        _sessions(holders["sessions"]),
    )


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(*left, box=None, header_style="dim")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _use(entry: Entry) -> list[str]:
    places = ("pool", "host", "shared", "recomputed")
    return [str(entry[f"num_{place}_tokens"]) for place in places]


def _executors(executors: Sequence[Entry]) -> Table:
    table = _table(["executor"], ["requests", "sessions"])
    for one in executors:
        counts = [str(one["num_requests"]), str(one["num_sessions"])]
        table.add_row(one["executor"], *(counts if one["is_connected"] else [UNKNOWN, UNKNOWN]))
    return table


def _shares(shares: Sequence[Entry]) -> Table:
    table = _table(["key", "class"], ["requests", "wait", *USE])
    for one in shares:
        counts = [str(one["num_requests"]), str(one["num_waiting"])]
        table.add_row(one["api_key"] or NONE, one["request_class"] or NONE, *counts, *_use(one))
    return table


def _requests(requests: Sequence[Entry]) -> Table:
    table = _table(["request", "key", "session", "class", "state"], ["waits", *USE])
    table.add_column("because")
    for one in requests:
        names = [one[name] or NONE for name in ("api_key", "session_id", "request_class")]
        wait = f"{one['waited_s']:.1f} s"
        table.add_row(one["request_id"], *names, one["state"], wait, *_use(one), one["why_text"])
    return table


def _sessions(sessions: Sequence[Entry]) -> Table:
    table = _table(["kept for session", "key"], ["tokens", "pool", "host", "for"])
    for one in sessions:
        counted = [one["num_pool_tokens"], one["num_host_tokens"]]
        for_s = one["retained_for_s"]
        table.add_row(
            one["session_id"] or NONE,
            one["api_key"] or NONE,
            str(one["num_retained_tokens"]),
            *(UNKNOWN if count is None else str(count) for count in counted),
            UNKNOWN if for_s is None else f"{for_s:.0f} s",
        )
    return table
