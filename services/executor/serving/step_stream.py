"""One gateway's stream of frames: what each engine step added to all of its requests.

The engine side only ever adds to the pending frame; the one writer takes it as soon as it can.
A writer that lags finds several steps in one frame. Nothing is dropped: the pending frame holds no
more than the tokens that live requests may still produce. What is too much for one message waits
for the next: a message above gRPC's limit would end the stream.

A frame costs a gateway and the executor about as much as some dozens of tokens in it. Those that
are *covered*, since their readers have enough in hand, wait for the next beat therefore, unless a
frame goes before it, or they have become many.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat

from services.executor.types import Delta, Ending, Rejection, Token
from services.generation.logprobs import EchoedPrompt, TokenLogprobs
from services.generation.retention import Retained
from services.reporting.load import ExecutorLoad

BEAT_S = 0.25  # a frame at least so often; gateways take seconds without one for a broken link
MAX_COVERED_TOKENS = 64  # in one frame: not for long does the gateway do nothing else
MAX_FRAME_BYTES = 256 << 10  # of tokens and echoes, but for the last; some 30 ms to write
ENTRY_BYTES = 32  # of a token or a probability on the wire, without its text
CHARACTER_BYTES = 4  # at most
ID_BYTES = 4  # of a prompt's token, at most in vocabularies below 2**28


@dataclass(slots=True)
class Output:
    """New tokens of one request, its ending, or both."""

    first_token_index: int  # of `tokens[0]` in the request's output
    tokens: list[Token] = field(default_factory=list)
    ending: Ending | None = None
    prompt: EchoedPrompt | None = None  # with the first tokens, if asked for
    num_reasoning_tokens: int | None = None  # with the ending, if reasoning is parsed
    num_cached_tokens: int = 0  # of the prompt, with the ending
    stop_string: str = ""  # that the answer came to, with the ending
    retained: Retained | None = None  # of its KV, with the ending


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the engine says of a request that it takes; zeros where it was aborted before."""

    num_prompt_tokens: int = 0
    max_tokens: int = 0  # that the answer may have
    prompt_digest: int = 0  # of the prompt's ids


@dataclass(slots=True)
class Frame:
    """What happened since the previous frame; each mapping is keyed by request id."""

    sequence: int  # position in the stream, from 0, without gaps
    accepted: dict[str, Acceptance] = field(default_factory=dict)
    rejected: list[tuple[str, Rejection]] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)
    num_engine_steps: int = 0  # that have ended when it is taken
    is_leaving: bool = False  # the executor takes nothing new
    load: ExecutorLoad | None = None  # None: as told before

    @property
    def has_news(self) -> bool:
        """Whether anything happened to a request."""
        return bool(self.accepted or self.rejected or self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs.values())


class StepStream:
    """Merges what happens between two reads of the writer into one frame."""

    def __init__(self, num_steps: Callable[[], int] = lambda: 0) -> None:
        """`num_steps` returns how many steps the engine has ended."""
        self._num_steps = num_steps
        self._pending = Frame(sequence=0)
        self._is_due = False  # a frame, whether or not there is news
        self._num_waiting = 0  # tokens pushed since a frame was taken
        self._is_leaving = False
        self._load: ExecutorLoad | None = None  # newest
        self._told_load: ExecutorLoad | None = None  # that the gateway knows
        self._num_sent: dict[
            str, int
        ] = {}  # live requests: tokens that the gateway has, with frames taken
        self._wake = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    def knows(self, request_id: str) -> bool:
        """Return whether the writer has not yet taken the ending of this accepted request."""
        return request_id in self._num_sent

    def accept(self, request_id: str, acceptance: Acceptance, *, num_known: int = 0) -> None:
        """Say that the engine took a request; precedes everything else about it. `num_known`:
        tokens that the gateway has of its answer.
        """
        assert not self.knows(request_id), f"{request_id} is live"
        self._num_sent[request_id] = num_known
        self._pending.accepted[request_id] = acceptance
        self._wake.set()

    def reject(self, request_id: str, rejection: Rejection) -> None:
        """Say that the engine refused a request."""
        self._pending.rejected.append((request_id, rejection))
        self._wake.set()

    def push(
        self,
        request_id: str,
        delta: Delta,
        *,
        prompt: EchoedPrompt | None = None,
        num_covering: float = math.inf,
    ) -> None:
        """Add one step of an accepted request, `prompt` with its first token. `num_covering`: of
        its tokens the gateway must have so many for new ones to be covered.
        """
        output = self._pending.outputs.get(request_id)
        if output is None:
            output = Output(first_token_index=self._num_sent[request_id])
            self._pending.outputs[request_id] = output
        output.tokens.extend(delta.tokens)
        output.ending = delta.ending
        output.num_reasoning_tokens = delta.num_reasoning_tokens
        output.num_cached_tokens = delta.num_cached_tokens
        output.stop_string = delta.stop_string
        output.retained = delta.retained
        output.prompt = prompt or output.prompt
        self._num_waiting += len(delta.tokens)
        is_covered = self._num_sent[request_id] >= num_covering and delta.ending is None
        if not is_covered or self._num_waiting > MAX_COVERED_TOKENS:
            self._wake.set()

    def beat(self) -> None:
        """Have the writer take a frame soon, without news if there is none."""
        self._is_due = True
        self._wake.set()

    def tell(self, load: ExecutorLoad) -> None:
        """Have the writer tell a load soon, unless the gateway knows it."""
        self._load = load
        if load != self._told_load:
            self.beat()

    def leave(self) -> None:
        """Say from now on, and soon, that the executor is leaving."""
        self._is_leaving = True
        self.beat()

    def end(self, error: Exception | None = None) -> None:
        """Let the writer stop, raising `error` if given, once it has taken what is pending."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def next_frame(self) -> Frame | None:
        """Wait for news that is not covered, and take all news; None at the end. For one writer
        only.
        """
        await self._wake.wait()
        if self._has_news():
            return self._take()
        if self._error is not None:
            raise self._error
        return None

    def _has_news(self) -> bool:
        return self._is_due or self._pending.has_news

    def _take(self) -> Frame:
        taken, self._pending = _cut(self._pending, MAX_FRAME_BYTES)
        self._is_due, self._num_waiting = False, 0
        news = self._load if self._load != self._told_load else None
        self._told_load = self._load
        frame = replace(
            taken, num_engine_steps=self._num_steps(), is_leaving=self._is_leaving, load=news
        )
        for request_id, output in frame.outputs.items():
            if output.ending is not None:
                del self._num_sent[request_id]
            else:
                self._num_sent[request_id] += len(output.tokens)
        if not self._ended and not self._has_news():
            self._wake.clear()
        return frame


def _cut(frame: Frame, room: int) -> tuple[Frame, Frame]:
    """Return a frame with outputs that fill `room` bytes, and the next one with the rest."""
    first, rest = replace(frame, outputs={}), Frame(sequence=frame.sequence + 1)
    for request_id, output in frame.outputs.items():
        if room <= 0:
            rest.outputs[request_id] = output
            continue
        first.outputs[request_id], left, room = _split(output, room)
        if left is not None:
            rest.outputs[request_id] = left
    return first, rest


def _split(output: Output, room: int) -> tuple[Output, Output | None, int]:
    """Return what of an output fills `room` bytes, what is left of it, and of the room."""
    if output.prompt is not None:
        first, left, room = _split_prompt(output.prompt, room)
        if left is not None:
            head = Output(output.first_token_index, prompt=first)
            return head, replace(output, prompt=left), room
    num_first, room = _fill(map(_token_bytes, output.tokens), room)
    if num_first == len(output.tokens):
        return output, None, room
    head = Output(output.first_token_index, output.tokens[:num_first], prompt=output.prompt)
    left_tokens = output.tokens[num_first:]
    first_left = output.first_token_index + num_first
    left_output = replace(output, first_token_index=first_left, tokens=left_tokens, prompt=None)
    return head, left_output, room


def _split_prompt(prompt: EchoedPrompt, room: int) -> tuple[EchoedPrompt, EchoedPrompt | None, int]:
    """Return what of a prompt fills `room` bytes, what is left of it, and of the room."""
    ids, logprobs = prompt.token_ids, prompt.logprobs
    room -= CHARACTER_BYTES * len(prompt.text)
    num_ids, room = _fill(repeat(ID_BYTES, len(ids)), room)
    num_logprobs, room = _fill(map(_logprobs_bytes, logprobs), room)
    if num_ids == len(ids) and num_logprobs == len(logprobs):
        return prompt, None, room
    first = EchoedPrompt(prompt.text, logprobs[:num_logprobs], ids[:num_ids])
    return first, EchoedPrompt("", logprobs[num_logprobs:], ids[num_ids:]), room


def _fill(sizes: Iterable[int], room: int) -> tuple[int, int]:
    """Return how many entries of these sizes go in until there is no room, and what is left."""
    num_entries = 0
    for size in sizes:
        if room <= 0:
            break
        num_entries, room = num_entries + 1, room - size
    return num_entries, room


def _token_bytes(token: Token) -> int:
    """Return at least what a token takes on the wire."""
    num_characters = len(token.text) + len(token.reasoning)
    for part in token.tool_calls:
        num_characters += len(part.id) + len(part.name) + len(part.arguments) + ENTRY_BYTES
    size = ENTRY_BYTES + CHARACTER_BYTES * num_characters
    return size if token.logprobs is None else size + _logprobs_bytes(token.logprobs)


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    entries = (logprobs.chosen, *logprobs.top)
    return sum(ENTRY_BYTES + CHARACTER_BYTES * len(entry.token) for entry in entries)
