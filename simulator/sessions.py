"""Sessions of agents: steps that begin with what was said before them, and wait for others.

A step follows the one before it once a tool has answered or a person has written. Branches begin
alike and run side by side; a sub-agent has a session of its own. The next step waits for all.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.placement.types import RequestId
from simulator.workload import ArrivingRequest, Lengths

SHARED_TEXT = "what all sessions begin with"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said so far, and which requests the next step follows."""

    name: str
    num_said: int = 0  # tokens
    branches_off: tuple[tuple[str, int], ...] = ()  # see `ArrivingRequest`
    begins_s: float = 0.0
    follows: tuple[RequestId, ...] = ()

    def step(
        self, request_id: str, num_message: int, num_answer: int, *, wait_s: float = 0.0
    ) -> ArrivingRequest:
        """Return the next step, whose prompt is all that was said and a message; tokens, >= 1."""
        made = ArrivingRequest(
            request_id=RequestId(request_id),
            arrival_s=self.begins_s,
            num_prompt_tokens=self.num_said + num_message,
            num_output_tokens=num_answer,
            follows=self.follows,
            wait_s=wait_s,
            conversation=self.name,
            branches_off=self.branches_off,
        )
        self.num_said += num_message + num_answer
        self.follows = (made.request_id,)
        return made

    def branch(self, name: str, num_tokens: int | None = None) -> "Conversation":
        """Return another that begins with so many tokens of this one; None: with all of them."""
        kept = self.num_said if num_tokens is None else num_tokens
        whole = (*self.branches_off, (self.name, self.num_said))
        parts, begin = [], 0
        for text, end in whole:
            if begin < kept:
                parts.append((text, min(end, kept)))
            begin = end
        return replace(self, name=name, num_said=kept, branches_off=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSessions:
    """Statistics that sessions are drawn by.

    The defaults of the first five are those of 357,161 published steps of coding agents (TraceLab,
    CC BY 4.0), but for the number of steps, whose published mean of 84 fits no session that keeps
    all it was told: these forget. The others are assumptions.
    """

    num_steps: int = 40
    mean_prompt_tokens: float = 154_000.0  # over all steps
    seen_frac: float = 0.96  # of a session's prompt tokens: said before in it, in [0, 1)
    answer_tokens: float = 523.0  # mean
    tool_frac: float = 0.89  # of steps: begun by a tool; by a person the others, the first too
    tool_wait_s: tuple[float, float] = (1.0, 30.0)  # least and most, each as likely
    pause_s: float = 300.0  # of a person, mean of an exponential
    session_gap_s: float = 60.0  # between the beginnings of sessions, mean of an exponential
    shared_tokens: int = 0  # that all sessions begin with, of the first message
    branch_frac: float = 0.0  # of steps: branches run before the next one
    num_branches: int = 3
    subagent_frac: float = 0.0  # of steps: a sub-agent runs before the next one
    num_subagent_steps: int = 4

    def scaled(self, scale: float) -> "AgentSessions":
        """Return the same with so large a share of the tokens, > 0."""
        return replace(
            self,
            mean_prompt_tokens=scale * self.mean_prompt_tokens,
            answer_tokens=scale * self.answer_tokens,
            shared_tokens=round(scale * self.shared_tokens),
        )

    def messages(self) -> tuple[float, float]:
        """Return the mean tokens of a session's first message and of each later one.

        n steps of mean prompt P read n P tokens, of which first + (n - 1) later are new. Each
        prompt is longer than the one before it by an answer and a message.

        Raises:
            ValueError: no session of so many steps has these means.
        """
        num, prompt = self.num_steps, self.mean_prompt_tokens
        if num == 1:
            return prompt, 0.0
        num_new = (1.0 - self.seen_frac) * num * prompt
        later = 2.0 * (num_new - prompt) / (num - 1) + self.answer_tokens
        first = num_new - (num - 1) * later
        if min(first - self.shared_tokens, later) < 1.0:
            raise ValueError(
                f"no session of {num} steps has a mean prompt of {prompt:,.0f} tokens of which "
                f"{self.seen_frac:.0%} were said before: its first message would have "
                f"{first:,.0f} tokens, later ones {later:,.0f}"
            )
        return first, later


def draw_sessions(given: AgentSessions, num: int, *, seed: int) -> list[ArrivingRequest]:
    """Return the steps of `num` sessions, each behind those that it follows.

    Raises:
        ValueError: as `AgentSessions.messages`.
    """
    lengths, begins_s, steps = given.messages(), 0.0, list[ArrivingRequest]()
    for number in range(num):
        rng = random.Random(f"session {seed} {number}")
        steps += _Session(given, lengths, rng, f"s{number}").steps(begins_s)
        begins_s += rng.expovariate(1.0 / given.session_gap_s) if given.session_gap_s else 0.0
    return steps


class _Session:
    """One session as it is drawn."""

    def __init__(
        self, given: AgentSessions, messages: tuple[float, float], rng: random.Random, name: str
    ) -> None:
        self._given, self._rng, self._name = given, rng, name
        self._first = Lengths(mean=messages[0] - given.shared_tokens)
        self._later = Lengths(mean=max(1.0, messages[1]))
        self._answer = Lengths(mean=given.answer_tokens)

    def steps(self, begins_s: float) -> Iterator[ArrivingRequest]:
        given, rng = self._given, self._rng
        main = self._beginning(self._name, begins_s)
        for number in range(given.num_steps):
            yield self._step(main, number)
            if number + 1 == given.num_steps:
                return
            before, others = main.follows, tuple[RequestId, ...]()
            if rng.random() < given.branch_frac:
                for which in range(given.num_branches):
                    branch = main.branch(f"{self._name}.{number}b{which}")
                    yield self._step(branch, 1)
                    others += branch.follows
            if rng.random() < given.subagent_frac:
                helper = self._beginning(f"{self._name}.{number}a", begins_s)
                helper.follows = before
                yield from (self._step(helper, one) for one in range(given.num_subagent_steps))
                others += helper.follows
            main.follows = others or before

    def _beginning(self, name: str, begins_s: float) -> Conversation:
        num_shared = self._given.shared_tokens
        shared = ((SHARED_TEXT, num_shared),) if num_shared else ()
        return Conversation(name=name, num_said=num_shared, branches_off=shared, begins_s=begins_s)

    def _step(self, conversation: Conversation, number: int) -> ArrivingRequest:
        message = self._later if number else self._first
        return conversation.step(
            f"{conversation.name}.{number}",
            message.draw(self._rng),
            self._answer.draw(self._rng),
            wait_s=self._wait_s() if conversation.follows else 0.0,
        )

    def _wait_s(self) -> float:
        """Return how long a tool or a person takes: the first step is a person's."""
        given, rng = self._given, self._rng
        num = given.num_steps
        if rng.random() < given.tool_frac * num / max(1, num - 1):
            return rng.uniform(*given.tool_wait_s)
        return rng.expovariate(1.0 / given.pause_s) if given.pause_s else 0.0


def num_known_tokens(requests: Sequence[ArrivingRequest], block_size: int) -> dict[RequestId, int]:
    """Return how many leading tokens of each prompt the requests before it leave, in full blocks.

    A cache without end finds so many. A prompt's last token is computed in any case, an answer's
    newest one is not.
    """
    known, found = set[object](), dict[RequestId, int]()
    for request in requests:
        num_prompt = request.num_prompt_tokens
        keys = list(request.block_keys(block_size))
        leading = keys[: (num_prompt - 1) // block_size]
        num = next((n for n, key in enumerate(leading) if key not in known), len(leading))
        found[request.request_id] = num * block_size
        known.update(keys[: (num_prompt + request.num_output_tokens - 1) // block_size])
    return found
