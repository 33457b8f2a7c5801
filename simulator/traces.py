"""Requests read from recorded traces: our own format and four published ones.

Arrivals of published traces count from their first request. Their requests without a prompt or
without an answer, which is how failures are noted, are left out.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.workload import ArrivingRequest

AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
BURSTGPT_COLUMNS = {"Timestamp", "Request tokens", "Response tokens"}
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
    "prompt_hashes",
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
        requests = read_mooncake(path) if _is_mooncake(path) else read_jsonl(path)
    else:
        raise ValueError(f"{path}: traces end in .jsonl, .csv or .json")
    if not requests:
        raise ValueError(f"{path}: no request with a prompt and an answer")
    return requests


# -- our own ---------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> list[ArrivingRequest]:
    """Read our own format: one object per line, fields as in `ArrivingRequest` and `ServiceLevel`.

    All but the arrival and the lengths may be absent. Raises ValueError naming the line.
    """
    return sorted(_parsed(path, _from_object), key=lambda request: request.arrival_s)


def _from_object(row: dict[str, Any], number: int) -> ArrivingRequest:
    fields = {name: row[name] for name in OWN_FIELDS if name in row}
    level = {name: value for name, value in row.items() if name not in OWN_FIELDS}
    fields.setdefault("request_id", f"r{number}")
    fields["prompt_hashes"] = tuple(fields.get("prompt_hashes", ()))
    request = ArrivingRequest(**fields, level=ServiceLevel(**level))
    lengths = (request.num_prompt_tokens, request.num_output_tokens, request.leaves_after)
    if any(length is not None and length < 1 for length in lengths) or request.arrival_s < 0:
        raise ValueError("lengths must be at least 1, the arrival at least 0")
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


def _is_mooncake(path: Path) -> bool:
    _, first = next(_lines(path), (0, "{}"))
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and "input_length" in row


def read_csv(path: Path) -> list[ArrivingRequest]:
    """Read a trace of Azure (2023, 2024) or BurstGPT; the columns tell which.

    Azure's instants are dates, BurstGPT's are seconds. Raises ValueError naming the line.
    """
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        columns = set(table.fieldnames or ())
        if columns >= AZURE_COLUMNS:
            parse = _azure_row
        elif columns >= BURSTGPT_COLUMNS:
            parse = _burstgpt_row
        else:
            raise ValueError(f"{path}: neither Azure's columns nor BurstGPT's: {sorted(columns)}")
        rows = []
        for row in table:
            try:
                rows.append(parse(row, table.line_num))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{table.line_num}: {error}") from error
    return _requests(rows)


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
    """Return requests per second from the first arrival to the last; inf if all come at once."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s else float("inf")


def at_rate(requests: list[ArrivingRequest], rate_per_s: float) -> list[ArrivingRequest]:
    """Stretch all gaps alike so that requests come at this mean rate, > 0."""
    own = mean_rate_per_s(requests)
    if own == float("inf"):
        return requests
    stretch = own / rate_per_s
    return [replace(request, arrival_s=request.arrival_s * stretch) for request in requests]
