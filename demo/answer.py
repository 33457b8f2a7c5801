"""One chat answer through the public HTTP API: shown as it arrives, measured at the client."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from services.pacing.attainment import DELIVERY_TOLERANCE_S, tpot_s
from services.pacing.deposit import next_due_s

ANSWER_TIMEOUT_S = 120.0  # between two events


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedAnswer:
    """One answer as its client saw it. Times are seconds on one clock."""

    text: str
    num_prompt_tokens: int  # as the server counted
    num_tokens: int  # as the server counted
    sent_s: float
    arrived_s: tuple[float, ...]  # one per event with text

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.arrived_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked."""

    text: str
    context: str = ""  # stands before the question
    request_id: str = ""  # empty: the gateway chooses one


class AnswerError(Exception):
    """The request failed; the message is the server's."""


def stream_answer(
    base_url: str,
    model: str,
    question: Question,
    *,
    rate_tps: float,
    show: Callable[[str], None],
) -> PacedAnswer:
    """Ask, call `show` with each piece of text as it arrives, return what was measured.

    Raises AnswerError when the server refuses or fails.
    """
    system = [{"role": "system", "content": question.context}] if question.context else []
    body = {
        "model": model,
        "messages": [*system, {"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": 400,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A small model has finished long before its reader; the tail keeps the pace all the same.
        "evenflow": {"pace_tail": True},
    }
    text, arrived_s = "", list[float]()
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    sent_s = time.monotonic()
    headers = {"x-consumption-rate-tps": str(rate_tps), "x-request-id": question.request_id}
    for event in _events(base_url, body, headers):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                arrived_s.append(time.monotonic())
                text += piece
                show(piece)
    if not arrived_s:
        raise AnswerError("the answer is empty")
    return PacedAnswer(
        text=text,
        num_prompt_tokens=usage["prompt_tokens"],
        num_tokens=usage["completion_tokens"],
        sent_s=sent_s,
        arrived_s=tuple(arrived_s),
    )


def summary(answer: PacedAnswer, *, rate_tps: float) -> str:
    """Return what the reader got, in words and milliseconds."""
    lines = [
        f"time to first token   {answer.ttft_s * 1e3:.0f} ms",
        f"tokens                {answer.num_tokens} in "
        f"{answer.arrived_s[-1] - answer.sent_s:.1f} s",
    ]
    mean_gap_s = tpot_s(answer.arrived_s)
    if mean_gap_s is None:
        return "\n".join(lines)
    gaps_ms = sorted(gap_s * 1e3 for gap_s in answer.gaps_s)
    late = num_late(answer.arrived_s, 1 / rate_tps)
    lines += [
        f"delivered             {1 / mean_gap_s:.1f} tokens/s; asked for {rate_tps:g}",
        f"gaps between tokens   median {statistics.median(gaps_ms):.0f} ms, shortest "
        f"{gaps_ms[0]:.0f} ms, longest {gaps_ms[-1]:.0f} ms; one interval is "
        f"{1e3 / rate_tps:.0f} ms",
        f"late tokens           {late} of {len(answer.arrived_s)} came more than "
        f"{DELIVERY_TOLERANCE_S * 1e3:.0f} ms after their turn",
    ]
    return "\n".join(lines)


def num_late(arrived_s: Sequence[float], interval_s: float) -> int:
    """Count tokens that came later than one interval after the previous token's turn.

    A late token moves the turns of all tokens after it.
    """
    late, previous_due_s = 0, arrived_s[0]
    for time_s in arrived_s[1:]:
        due_s = previous_due_s + interval_s
        if time_s > due_s + DELIVERY_TOLERANCE_S:
            late += 1
            previous_due_s = next_due_s(previous_due_s, time_s, interval_s)
        else:
            previous_due_s = due_s
    return late


def _events(
    base_url: str, body: dict[str, object], headers: dict[str, str]
) -> Iterator[dict[str, Any]]:
    with (
        httpx.Client(timeout=ANSWER_TIMEOUT_S) as client,
        client.stream(
            "POST", f"{base_url}/v1/chat/completions", json=body, headers=headers
        ) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise AnswerError(f"HTTP {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise AnswerError(event["error"]["message"])
            yield event
