"""One JSON line per plan, with its input: enough to make the same plan again."""

import json
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from evenflow.planner.v1 import planner_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)


def line_of(snapshot: pb.Snapshot, plan: pb.Plan) -> str:
    entry = {"snapshot": _as_dict(snapshot), "plan": _as_dict(plan)}
    return json.dumps(entry, separators=(",", ":"))


def entry_of(line: str) -> tuple[pb.Snapshot, pb.Plan]:
    """Return what a line holds, but for fields that are no more.

    Raises ValueError for anything but such a line.
    """
    try:
        entry = json.loads(line)
        return _message(entry["snapshot"], pb.Snapshot()), _message(entry["plan"], pb.Plan())
    except Exception as error:
        raise ValueError(f"not a decision: {error}") from error


def _message(entry: dict[str, Any], empty: MessageT) -> MessageT:
    return ParseDict(entry, empty, ignore_unknown_fields=True)


def _as_dict(message: Any) -> dict[str, Any]:
    return dict(MessageToDict(message, preserving_proto_field_name=True))


class DecisionLog:
    """Appends to a file; without a path it does nothing. The caller serialises the calls."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)

    def append(self, snapshot: pb.Snapshot, plan: pb.Plan) -> None:
        if self._file is not None:
            self._file.write(line_of(snapshot, plan) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
