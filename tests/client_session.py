"""What a client sends in one session, and a model that answers it.

A session is a JSON file in `clients/sessions/`. Long prose is the vendors' own and is not kept,
only how long it is: a marker such as `<1200 characters>`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import Script

SESSIONS = Path(__file__).parent / "clients" / "sessions"
LONGEST_PHRASE, LONGEST_WORD = 48, 128  # characters
INSTRUCTING = {"system", "developer"}
_MARKER = re.compile(r"<(\d+) characters>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request: its body is None where it has none."""

    method: str
    path: str  # with its query
    headers: dict[str, str]
    body: Any

    def content(self, **changes: Any) -> str | None:
        """Return the body as it is sent, with other values for some of its fields."""
        return None if self.body is None else json.dumps(with_filler(self.body) | changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool that the model calls whenever it is offered and no result of it is there."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All requests of a client, in the order in which it sent them."""

    client: str  # with its version
    contexts: list[int]  # tokens; the lengths of context at which the client must be answered
    call: Call | None
    steps: list[Step]

    def write(self, path: Path) -> None:
        """Write it to `path`, one line for each step."""
        told = asdict(self)
        steps = [json.dumps(step, ensure_ascii=False) for step in told.pop("steps")]
        head = json.dumps(told, ensure_ascii=False).removesuffix("}")
        path.write_text(head + ', "steps": [\n' + ",\n".join(steps) + "\n]}\n")

    @staticmethod
    def read(path: Path) -> "Session":
        told = json.loads(path.read_text())
        call = Call(**told["call"]) if told["call"] else None
        steps = [Step(**step) for step in told["steps"]]
        return Session(**told | {"call": call, "steps": steps})


def without_prose(value: Any, key: str = "") -> Any:
    """Return `value` with a marker of its length in the place of each text that is prose."""
    if isinstance(value, str):
        return f"<{len(value)} characters>" if _is_prose(value, key) else value
    if isinstance(value, dict):
        return {name: without_prose(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_prose(inner, key) for inner in value]
    return value


def _is_prose(text: str, key: str) -> bool:
    """Tell prose from names, ids and patterns, which are short or one word, and from JSON."""
    if _MARKER.fullmatch(text) or key == "arguments":
        return False
    longest = LONGEST_PHRASE if any(map(str.isspace, text)) else LONGEST_WORD
    return key == "description" or len(text) > longest


def with_filler(value: Any) -> Any:
    """Return `value` with filler of the same length in the place of each marker."""
    if isinstance(value, str):
        marker = _MARKER.fullmatch(value)
        return filler(int(marker[1])) if marker else value
    if isinstance(value, dict):
        return {name: with_filler(inner) for name, inner in value.items()}
    return [with_filler(inner) for inner in value] if isinstance(value, list) else value


def filler(length: int) -> str:
    """Return so many characters of words."""
    return ("word " * length)[:length]


def model_that_calls(call: Call | None) -> Callable[[pb.Submit], Script]:
    """Return what the model says to each request: it calls the tool, and answers with its result.

    Instructions that a client adds after the result ask for no further call.
    """

    def script(submit: pb.Submit) -> Script:
        offered = {tool.name for tool in submit.chat.options.tools}
        roles = [turn.role for turn in submit.chat.messages if turn.role not in INSTRUCTING]
        if call is None or call.name not in offered or roles[-1] == "tool":
            return Script()
        return _calling(call, id=f"call_{len(submit.chat.messages)}")

    return script


def _calling(call: Call, id: str) -> Script:
    named = gen.ToolCallPart(index=0, id=id, name=call.name)
    arguments = gen.ToolCallPart(index=0, arguments=json.dumps(call.arguments))
    return Script(
        texts=["One moment.", pb.Token(tool_calls=[named]), pb.Token(tool_calls=[arguments])],
        finish_reason=gen.FINISH_REASON_TOOL_CALLS,
    )
