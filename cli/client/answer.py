"""One chat answer through the public HTTP API: shown as it arrives, measured at the client."""

import json
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from cli.client.endpoint import AnswerError as AnswerError
from cli.client.endpoint import Endpoint, RefusedError, UnreachableError
from cli.client.felt import TimedTokens
from services.pacing.attainment import DELIVERY_TOLERANCE_S, tpot_s
from services.pacing.reading import reading_of

ANSWER_TIMEOUT_S = 120.0  # between two events
DEFAULT_MAX_TOKENS = 400
ANSWERED = ("content", "tool_calls")  # of a delta
THOUGHT = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedAnswer(TimedTokens):
    """One answer as its client saw it. Times are seconds on one clock."""

    text: str
    num_prompt_tokens: int  # as the server counted; 0 for an answer that was left
    num_tokens: int  # as the server counted; those that arrived for an answer that was left
    num_cached_tokens: int = 0  # of the prompt, not computed again; 0 for an answer that was left
    finish_reason: str = ""  # as the server said it; empty for an answer that was left

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.read_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; None leaves it to the server."""

    temperature: float = 0.0  # [0, 2]; 0 is greedy
    top_p: float | None = None  # (0, 1]
    repetition_penalty: float | None = None  # (0, 10]
    seed: int | None = None

    def as_body(self) -> dict[str, object]:
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked."""

    text: str
    context: str = ""  # the system's message
    messages: tuple[Mapping[str, str], ...] = ()  # role and content of the turns before
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = DEFAULT_MAX_TOKENS  # fewer where the context leaves fewer
    request_id: str = ""  # empty: the gateway chooses one

    def as_messages(self) -> list[Mapping[str, str]]:
        system = [{"role": "system", "content": self.context}] if self.context else []
        return [*system, *self.messages, {"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one event brought."""

    text: str  # empty: the token has none of its own, as the first bytes of a character
    num_tokens: int  # >= 1
    arrived_s: float


@dataclass(slots=True)
class Arrivals:
    """When each token of a stream came, and how many came before the answer itself."""

    at_s: list[float] = field(default_factory=list)
    num_thoughts: int = 0
    _thinks: bool = False

    def take(self, choice: dict[str, Any], now_s: float) -> int:
        """Take in a choice of an event; return how many tokens it tells of.

        A token without text belongs to what is being said; after thoughts the answer begins with
        its first text or call.
        """
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ANSWERED):
            self._thinks = False
        elif any(delta.get(name) for name in THOUGHT):
            self._thinks = True
        num_tokens = num_tokens_told(choice)
        self.at_s += [now_s] * num_tokens
        if self._thinks:
            self.num_thoughts = len(self.at_s)
        return num_tokens


class AnswerStream:
    """An answer while it arrives. What came so far can be had at any time."""

    def __init__(
        self, endpoint: Endpoint, model: str, question: Question, *, rate_tps: float | None
    ) -> None:
        """With `rate_tps` > 0 the gateway keeps that pace; None: tokens come as they are made."""
        self._endpoint = endpoint
        self._body = _body(model, question, rate_tps)
        self._headers = {**endpoint.headers, "x-request-id": question.request_id}
        if rate_tps is not None:
            self._headers["x-consumption-rate-tps"] = str(rate_tps)
        self._usage = dict[str, Any]()
        self._text = ""
        self._finish_reason = ""
        self._arrivals = Arrivals()
        self._sent_s = 0.0

    def pieces(self) -> Generator[Piece]:
        """Ask, and yield each piece as it arrives. Closing the iterator ends the request.

        Raises AnswerError when the server refuses or fails.
        """
        self._sent_s = time.monotonic()
        for event in self._events():
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._finish_reason = choice.get("finish_reason") or ""
                now_s = time.monotonic()
                if num_tokens := self._arrivals.take(choice, now_s):
                    text = choice["delta"].get("content") or ""
                    self._text += text
                    yield Piece(text=text, num_tokens=num_tokens, arrived_s=now_s)

    @property
    def is_begun(self) -> bool:
        return bool(self._arrivals.at_s)

    def answer(self) -> PacedAnswer:
        """Return what arrived. Raises AnswerError if nothing has."""
        arrivals = self._arrivals
        if not arrivals.at_s:
            raise AnswerError("the answer is empty")
        return PacedAnswer(
            text=self._text,
            num_prompt_tokens=self._usage.get("prompt_tokens", 0),
            num_cached_tokens=_num_cached(self._usage),
            num_tokens=self._usage.get("completion_tokens", len(arrivals.at_s)),
            sent_s=self._sent_s,
            arrived_s=tuple(arrivals.at_s),
            num_thoughts=arrivals.num_thoughts,
            finish_reason=self._finish_reason,
        )

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            yield from _post(self._endpoint, self._body, self._headers)
        except RefusedError as error:
            if error.param != "max_tokens":
                raise
            # The context leaves fewer than asked for; unstated, all that it leaves.
            body = {name: value for name, value in self._body.items() if name != "max_tokens"}
            yield from _post(self._endpoint, body, self._headers)


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
    stream = AnswerStream(Endpoint(base_url=base_url), model, question, rate_tps=rate_tps)
    for piece in stream.pieces():
        show(piece.text)
    return stream.answer()


def summary(answer: PacedAnswer, *, rate_tps: float) -> str:
    """Return what the reader got, in words and milliseconds."""
    lines = [
        f"time to first token   {answer.ttft_s * 1e3:.0f} ms",
        f"tokens                {answer.num_tokens} in "
        f"{answer.arrived_s[-1] - answer.sent_s:.1f} s",
    ]
    mean_gap_s = tpot_s(answer.read_s)
    if mean_gap_s is None:
        return "\n".join(lines)
    gaps_ms = sorted(gap_s * 1e3 for gap_s in answer.gaps_s)
    late = num_late(answer.read_s, 1 / rate_tps)
    lines += [
        f"delivered             {1 / mean_gap_s:.1f} tokens/s; asked for {rate_tps:g}",
        f"gaps between tokens   median {statistics.median(gaps_ms):.0f} ms, shortest "
        f"{gaps_ms[0]:.0f} ms, longest {gaps_ms[-1]:.0f} ms; one interval is "
        f"{1e3 / rate_tps:.0f} ms",
        f"late tokens           {late} of {len(answer.read_s)} came more than "
        f"{DELIVERY_TOLERANCE_S * 1e3:.0f} ms after their turn",
    ]
    return "\n".join(lines)


def num_late(arrived_s: Sequence[float], interval_s: float) -> int:
    """Count tokens that came later than one interval after the previous token's turn.

    A late token moves the turns of all tokens after it.
    """
    return reading_of(arrived_s, interval_s).num_late


def num_tokens_told(choice: dict[str, Any]) -> int:
    """Return how many tokens a choice of a streamed event tells of, of a chat or a completion.

    Told by their probabilities; without these, whatever the event says is one token.
    """
    probabilities = choice.get("logprobs") or {}
    scored = probabilities.get("content") or probabilities.get("tokens") or ()
    delta = choice.get("delta") or {}
    said = choice.get("text") or any(delta.get(name) for name in (*ANSWERED, *THOUGHT))
    return len(scored) or int(bool(said))


def _body(model: str, question: Question, rate_tps: float | None) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "messages": question.as_messages(),
        **question.sampling.as_body(),
        "max_tokens": question.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        # With probabilities a token is told even if it has no text, so that each can be timed.
        "logprobs": True,
    }
    if rate_tps is not None:
        # A small model has finished long before its reader; the tail keeps the pace all the same.
        body["evenflow"] = {"pace_tail": True}
    return body


def _num_cached(usage: Mapping[str, Any]) -> int:
    """Return a server's count of cached tokens; 0 if it tells none."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _post(
    endpoint: Endpoint, body: dict[str, object], headers: dict[str, str]
) -> Iterator[dict[str, Any]]:
    url = f"{endpoint.base_url}/v1/chat/completions"
    try:
        with (
            httpx.Client(timeout=ANSWER_TIMEOUT_S) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                answer.read()
                raise RefusedError(answer.status_code, answer.text)
            yield from _parse(answer.iter_lines())
    except httpx.ConnectError as error:
        raise UnreachableError(endpoint.base_url) from error
    except httpx.TransportError as error:
        raise AnswerError(f"the connection to {endpoint.base_url} broke: {error}") from error


def _parse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. Raises AnswerError for one that tells of an error."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        event = json.loads(data)
        if "error" in event:
            raise AnswerError(event["error"]["message"])
        yield event
