"""Requests read from recorded traces: our own format and six published ones.

Arrivals of published traces count from their first request. Their requests without a prompt or
without an answer, which is how failures are noted, are left out.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, TypeVar

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.sessions import SHARED_TEXT, Conversation
from simulator.workload import ArrivingRequest

AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
BURSTGPT_COLUMNS = {"Timestamp", "Request tokens", "Response tokens"}
TRACELAB_COLUMNS = {
    "id", "input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len"
}  # fmt: skip
T = TypeVar("T")
OWN_FIELDS = (
    "request_id",
    "arrival_s",
    "num_prompt_tokens",
    "num_output_tokens",
    "priority",
    "fairness_id",
    "conversation",
    "leaves_after",
    "follows",
    "wait_s",
    "branches_off",
    "prompt_hashes",
    "hashed_tokens",
)


def read_trace(path: Path, *, step_s: float) -> list[ArrivingRequest]:
    """Read a trace in any known format, which its name and first line tell; by arrival.

    `step_s`: length of the engine steps that OrbitFlow's arrivals count. Raises ValueError, with
    the file and where possible the line, if the file is in none of the formats or has no request.
    """
    if path.suffix == ".json":
        requests = read_orbitflow(path, step_s=step_s)
    elif path.suffix == ".csv":
        requests = read_csv(path)
    elif path.suffix == ".jsonl":
        requests = _reader_of_lines(path)(path)
    else:
        raise ValueError(f"{path}: traces end in .jsonl, .csv or .json")
    if not requests:
        raise ValueError(f"{path}: no request with a prompt and an answer")
    return requests


# -- our own ---------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[ArrivingRequest]:
    """Read our own format: one object per line, fields as in `ArrivingRequest` and `ServiceLevel`.

    All but the arrival and the lengths may be absent. A request that follows others comes behind
    them. Raises ValueError naming the line.
    """
    arrivals_s: dict[str, float] = {}

    def behind_others(row: dict[str, Any], number: int) -> ArrivingRequest:
        request = _from_object(row, number)
        # Sorting keeps it behind them: it does not arrive before they do.
        earliest_s = max((arrivals_s[name] for name in request.follows), default=0.0)
        request = replace(request, arrival_s=max(request.arrival_s, earliest_s))
        arrivals_s[request.request_id] = request.arrival_s
        return request

    return sorted(_parsed(path, behind_others), key=lambda request: request.arrival_s)


def _from_object(row: dict[str, Any], number: int) -> ArrivingRequest:
    fields = {name: row[name] for name in OWN_FIELDS if name in row}
    level = {name: value for name, value in row.items() if name not in OWN_FIELDS}
    fields.setdefault("request_id", f"r{number}")
    for name in ("prompt_hashes", "follows"):
        fields[name] = tuple(fields.get(name, ()))
    fields["branches_off"] = tuple((text, end) for text, end in fields.get("branches_off", ()))
    request = ArrivingRequest(**fields, level=ServiceLevel(**level))
    lengths = (request.num_prompt_tokens, request.num_output_tokens, request.leaves_after)
    times_s = (request.arrival_s, request.wait_s)
    if any(length is not None and length < 1 for length in lengths) or min(times_s) < 0:
        raise ValueError("lengths must be at least 1, the arrival and the wait at least 0")
    return request


# -- published -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One request of a published trace."""

    name: str
    instant_s: float  # on the trace's own clock
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_hashes: tuple[int, ...] = ()


def read_orbitflow(path: Path, *, step_s: float) -> list[ArrivingRequest]:
    """Read a trace of OrbitFlow's artefact, whose arrivals count engine steps of `step_s`.

    The header's batch and block limits are not read: they belong to the deployment.
    """
    try:
        rows = json.loads(path.read_text())["requests"]
        return _requests(
            _Row(
                name=name,
                instant_s=float(row["arrival_time"]) * step_s,
                num_prompt_tokens=int(row["input_length"]),
                num_output_tokens=int(row["output_length"]),
            )
            for name, row in rows.items()
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not OrbitFlow's format: {error!r}") from error


def read_mooncake(path: Path) -> list[ArrivingRequest]:
    """Read a trace of Mooncake: JSON lines with `timestamp` in milliseconds. Raises ValueError
    naming the line.
    """
    return _requests(_parsed(path, _mooncake_row))


def _mooncake_row(row: dict[str, Any], number: int) -> _Row:
    return _Row(
        name=f"r{number}",
        instant_s=row["timestamp"] / 1e3,
        num_prompt_tokens=int(row["input_length"]),
        num_output_tokens=int(row["output_length"]),
        prompt_hashes=tuple(map(int, row.get("hash_ids", ()))),
    )


def _reader_of_lines(path: Path) -> Callable[[Path], list[ArrivingRequest]]:
    """Return what reads a file of JSON lines; the fields of its first tell."""
    _, first = next(_lines(path), (0, "{}"))
    try:
        row = json.loads(first)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        return read_jsonl
    if "input_length" in row:
        return read_mooncake
    return read_inferencex if "requests" in row else read_jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One request of a recorded session, in seconds of its clock."""

    name: str
    agent: str  # the main one: empty
    begin_s: float
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def read_inferencex(path: Path) -> list[ArrivingRequest]:
    """Read InferenceX's agent traces (Apache 2.0): a session per line, which all begin at once.

    A call follows the last one of its agent that had ended when it was made; a main agent's also
    the sub-agents that had ended since that one began, a sub-agent's first one the main agent's
    last. It comes as long after these as it was recorded, however long they take here. Hash ids,
    one per `block_size` tokens, are a session's own. Raises ValueError naming the line.
    """
    sessions = _parsed(path, _inferencex_session)
    return sorted((one for session in sessions for one in session), key=lambda one: one.arrival_s)


def _inferencex_session(row: dict[str, Any], number: int) -> list[ArrivingRequest]:
    calls = sorted(_calls(row, f"s{number}"), key=lambda call: call.begin_s)
    made: dict[RequestId, ArrivingRequest] = {}
    prefixes: dict[tuple[int, int], int] = {}  # a hash's by the one before it and its id
    for call, others in _followed(calls):
        hashes, before = list[int](), -1
        for hash_id in call.hash_ids:
            before = prefixes.setdefault((before, hash_id), (number << 32) + len(prefixes))
            hashes.append(before)
        follows = tuple(RequestId(other.name) for other in others)
        arrival_s = call.begin_s - calls[0].begin_s
        if others:  # sorting keeps it behind them
            arrival_s = max(made[other].arrival_s for other in follows)
        made[RequestId(call.name)] = ArrivingRequest(
            request_id=RequestId(call.name),
            arrival_s=arrival_s,
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=call.num_output_tokens,
            follows=follows,
            wait_s=call.begin_s - max((other.end_s for other in others), default=call.begin_s),
            prompt_hashes=tuple(hashes),
            hashed_tokens=int(row["block_size"]),
        )
    return list(made.values())


def _calls(row: dict[str, Any], session: str) -> Iterator[_Call]:
    """Yield a session's calls that have a prompt and an answer."""
    for place, entry in enumerate(row["requests"]):
        agent = f"a{place}" if entry["type"] == "subagent" else ""
        for step, call in enumerate(entry["requests"] if agent else [entry]):
            if min(call["in"], call["out"]) > 0:
                yield _Call(
                    name=f"{session}.{agent}.{step}" if agent else f"{session}.{place}",
                    agent=agent,
                    begin_s=call["t"],
                    end_s=call["t"] + call.get("api_time", 0.0),
                    num_prompt_tokens=call["in"],
                    num_output_tokens=call["out"],
                    hash_ids=tuple(call["hash_ids"]),
                )


def _followed(calls: Sequence[_Call]) -> Iterator[tuple[_Call, list[_Call]]]:
    """Yield each of a session's calls, by their beginnings, and what it waits for."""
    leaves_s = {call.agent: call.end_s for call in sorted(calls, key=lambda call: call.end_s)}
    at_work = list[tuple[float, int]]()  # a heap: the end and the place of each
    last: dict[str, _Call] = {}  # of each agent, of the calls that have ended
    for place, call in enumerate(calls):
        while at_work and at_work[0][0] <= call.begin_s:
            ended = calls[heappop(at_work)[1]]
            last[ended.agent] = ended
        heappush(at_work, (call.end_s, place))
        main = last.get("")
        if call.agent:
            before = last.get(call.agent, main)
            yield call, [before] if before else []
            continue
        since_s = main.begin_s if main else float("-inf")
        back = [
            other
            for agent, other in last.items()
            if agent and since_s < other.end_s and leaves_s[agent] <= call.begin_s
        ]
        yield call, [main, *back] if main else back


def read_csv(path: Path) -> list[ArrivingRequest]:
    """Read a trace of Azure (2023, 2024), BurstGPT or TraceLab; the columns tell which.

    Azure's instants are dates, BurstGPT's are seconds. Raises ValueError naming the line.
    """
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = set(table.fieldnames or ())
        if columns >= TRACELAB_COLUMNS:
            return _tracelab_sessions(path, table)
        if columns >= AZURE_COLUMNS:
            parse = _azure_row
        elif columns >= BURSTGPT_COLUMNS:
            parse = _burstgpt_row
        else:
            raise ValueError(
                f"{path}: columns of neither Azure, BurstGPT nor TraceLab: {sorted(columns)}"
            )
        return _requests(_parsed_rows(path, table, parse))


def _parsed_rows(
    path: Path, table: "csv.DictReader[str]", parse: Callable[[Mapping[str, str], int], T]
) -> Iterator[T]:
    """Yield what `parse` makes of each row and its line's number."""
    for row in table:
        try:
            yield parse(row, table.line_num)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{table.line_num}: {error}") from error


def _azure_row(row: Mapping[str, str], number: int) -> _Row:
    instant = datetime.fromisoformat(row["TIMESTAMP"])
    return _Row(
        name=f"r{number}",
        instant_s=(instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp(),
        num_prompt_tokens=int(row["ContextTokens"]),
        num_output_tokens=int(row["GeneratedTokens"]),
    )


def _burstgpt_row(row: Mapping[str, str], number: int) -> _Row:
    return _Row(
        name=f"r{number}",
        instant_s=float(row["Timestamp"]),
        num_prompt_tokens=int(row["Request tokens"]),
        num_output_tokens=int(row["Response tokens"]),
    )


def _tracelab_sessions(path: Path, table: "csv.DictReader[str]") -> list[ArrivingRequest]:
    """Read sessions of agents' rounds, in order; `arrival_time`, in milliseconds, is a session's.

    A round reads `prefix_len` tokens that its session has said, and of the first round all do, and
    `input_len` more. It comes `tool_wait_after_ms` after the round before it has ended.
    """
    sessions: dict[str, tuple[Conversation, float]] = {}
    first_s: float | None = None

    def round_of(row: Mapping[str, str], number: int) -> ArrivingRequest:
        nonlocal first_s
        name, num_prefix = row["id"], int(row["prefix_len"])
        num_new, num_answer = int(row["input_len"]), int(row["output_len"])
        if min(num_new, num_answer) < 1 or num_prefix < 0:
            raise ValueError("lengths must be at least 1, the prefix at least 0")
        arrival_s = float(row["arrival_time"]) / 1e3
        first_s = arrival_s if first_s is None else min(first_s, arrival_s)
        shared = ((SHARED_TEXT, num_prefix),) if num_prefix else ()
        new = Conversation(name=name, num_said=num_prefix, branches_off=shared, begins_s=arrival_s)
        said, wait_s = sessions.get(name, (new, 0.0))
        if num_prefix < said.num_said:  # the session goes on without the rest
            said = said.branch(f"{name} {row['round_idx']}", num_prefix)
        num_message = num_prefix + num_new - said.num_said
        made = said.step(f"{name}.{row['round_idx']}", num_message, num_answer, wait_s=wait_s)
        sessions[name] = said, float(row["tool_wait_after_ms"]) / 1e3
        return made

    rounds = sorted(_parsed_rows(path, table, round_of), key=lambda one: one.arrival_s)
    return [replace(one, arrival_s=one.arrival_s - (first_s or 0.0)) for one in rounds]


def _requests(rows: Iterable[_Row]) -> list[ArrivingRequest]:
    complete = sorted(
        (row for row in rows if min(row.num_prompt_tokens, row.num_output_tokens) > 0),
        key=lambda row: row.instant_s,
    )
    return [
        ArrivingRequest(
            request_id=RequestId(row.name),
            arrival_s=row.instant_s - complete[0].instant_s,
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            prompt_hashes=row.prompt_hashes,
        )
        for row in complete
    ]


def _parsed(path: Path, parse: Callable[[dict[str, Any], int], T]) -> Iterator[T]:
    """Yield what `parse` makes of each line's object and number."""
    for number, line in _lines(path):
        try:
            yield parse(json.loads(line), number)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error!r}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


# -- what can be done with any ---------------------------------------------------------------------


def mean_rate_per_s(requests: Sequence[ArrivingRequest]) -> float:
    """Return requests per second from the first arrival to the last; inf if all come at once.

    Only of those that follow no other: of a trace of sessions it is how often one begins.
    """
    arrivals_s = [request.arrival_s for request in requests if not request.follows]
    span_s = arrivals_s[-1] - arrivals_s[0]
    return (len(arrivals_s) - 1) / span_s if span_s else float("inf")


def at_rate(requests: list[ArrivingRequest], rate_per_s: float) -> list[ArrivingRequest]:
    """Stretch all gaps alike so that requests come at this mean rate, > 0."""
    own = mean_rate_per_s(requests)
    if own == float("inf"):
        return requests
    stretch = own / rate_per_s
    return [replace(request, arrival_s=request.arrival_s * stretch) for request in requests]
