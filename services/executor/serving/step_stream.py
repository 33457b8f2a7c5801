"""One gateway's stream of frames: what each engine step added to all of its requests.

The engine side only ever adds to the pending frame; the one writer takes it as soon as it can.
A writer that lags finds several steps in one frame. Nothing is dropped, and nobody waits: the
pending frame holds no more than the tokens that live requests may still produce.
"""

import asyncio
from dataclasses import dataclass, field

from services.executor.types import Delta, Ending, Rejection, Token
from services.generation.logprobs import EchoedPrompt


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


@dataclass(slots=True)
class Frame:
    """What happened since the previous frame; each mapping is keyed by request id."""

    sequence: int  # position in the stream, from 0, without gaps
    accepted: dict[str, int] = field(default_factory=dict)  # number of prompt tokens
    rejected: list[tuple[str, Rejection]] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs.values())


class StepStream:
    """Merges what happens between two reads of the writer into one frame."""

    def __init__(self) -> None:
        self._pending = Frame(sequence=0)
        self._num_sent: dict[str, int] = {}  # live requests: tokens in frames taken so far
        self._wake = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    @property
    def num_pending_tokens(self) -> int:
        """Return how many tokens wait for the writer."""
        return self._pending.num_tokens

    def knows(self, request_id: str) -> bool:
        """Return whether the writer has not yet taken the ending of this accepted request."""
        return request_id in self._num_sent

    def accept(self, request_id: str, *, num_prompt_tokens: int) -> None:
        """Say that the engine took a request; precedes everything else about it."""
        assert not self.knows(request_id), f"{request_id} is live"
        self._num_sent[request_id] = 0
        self._pending.accepted[request_id] = num_prompt_tokens
        self._wake.set()

    def reject(self, request_id: str, rejection: Rejection) -> None:
        """Say that the engine refused a request."""
        self._pending.rejected.append((request_id, rejection))
        self._wake.set()

    def push(self, request_id: str, delta: Delta, *, prompt: EchoedPrompt | None = None) -> None:
        """Add one step of an accepted request, `prompt` with its first token."""
        output = self._pending.outputs.get(request_id)
        if output is None:
            output = Output(first_token_index=self._num_sent[request_id])
            self._pending.outputs[request_id] = output
        output.tokens.extend(delta.tokens)
        output.ending = delta.ending
        output.num_reasoning_tokens = delta.num_reasoning_tokens
        output.num_cached_tokens = delta.num_cached_tokens
        output.stop_string = delta.stop_string
        output.prompt = prompt or output.prompt
        self._wake.set()

    def end(self, error: Exception | None = None) -> None:
        """Let the writer stop, raising `error` if given, once it has taken what is pending."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def next_frame(self) -> Frame | None:
        """Wait for news and take all of it; None at the end. For one writer only."""
        await self._wake.wait()
        if self._has_news():
            return self._take()
        if self._error is not None:
            raise self._error
        return None

    def _has_news(self) -> bool:
        pending = self._pending
        return bool(pending.accepted or pending.rejected or pending.outputs)

    def _take(self) -> Frame:
        frame = self._pending
        self._pending = Frame(sequence=frame.sequence + 1)
        for request_id, output in frame.outputs.items():
            if output.ending is not None:
                del self._num_sent[request_id]
            else:
                self._num_sent[request_id] += len(output.tokens)
        if not self._ended:
            self._wake.clear()
        return frame
