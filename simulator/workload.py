"""Requests that arrive, drawn from distributions."""

import math
import random
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from services.placement.types import RequestId
from simulator.device.hardware import data_file

HASHED_TOKENS = 512  # that one of Mooncake's hashes stands for
DEFAULT_SIGMA = 1.0  # of a lognormal length of which only the mean is published


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingRequest:
    """One request of a workload. Its answer has exactly its limit's length.

    It arrives at `arrival_s`; one that follows others, `wait_s` after the last of these has ended,
    but not before `arrival_s`. An abort or a refusal ends a request, too.
    """

    request_id: RequestId
    arrival_s: float  # after the start, >= 0
    num_prompt_tokens: int  # >= 1
    num_output_tokens: int  # >= 1
    level: ServiceLevel = NO_SERVICE_LEVEL
    priority: int = 0  # lower is served first
    fairness_id: str = ""  # among which the pool is shared, where it is
    leaves_after: int | None = None  # tokens, >= 1, of which its reader goes; None: it stays
    follows: tuple[RequestId, ...] = ()
    wait_s: float = 0.0  # of a tool or a person, >= 0
    # What tells that requests begin alike: a conversation, whose turns each begin with all that was
    # said before, or hashes of the prompt's pieces. Neither: they do not.
    conversation: str = ""
    # What the conversation has of others: (name, tokens from the prompt's beginning up to there),
    # ascending. A name stands for one text, and for one before it.
    branches_off: tuple[tuple[str, int], ...] = ()
    prompt_hashes: tuple[int, ...] = ()  # each of a piece and all before it
    hashed_tokens: int = HASHED_TOKENS  # of a piece

    def block_keys(self, block_size: int) -> Iterator[Hashable]:
        """Yield what each leading full block is found by; of hashed prompts not the answer's."""
        number = 0
        while (key := self.shared_key(number, block_size)) is not None:
            yield key
            number += 1

    def shared_key(self, number: int, block_size: int) -> Hashable | None:
        """Return what a full block is found by; None: only this request can have it."""
        end = (number + 1) * block_size
        if self.conversation:
            num_tokens = self.num_prompt_tokens + self.num_output_tokens
            return (self._text_at(end), number) if end <= num_tokens else None
        if end > min(self.num_prompt_tokens, len(self.prompt_hashes) * self.hashed_tokens):
            return None
        piece, last = divmod(end - 1, self.hashed_tokens)
        return self.prompt_hashes[piece], last

    def _text_at(self, end: int) -> str:
        """Return the name of the text that the token before `end` is of."""
        place = bisect_left(self.branches_off, end, key=itemgetter(1))
        return self.branches_off[place][0] if place < len(self.branches_off) else self.conversation

    def block_key(self, number: int, block_size: int) -> Hashable:
        """Return what a full block is found by, if only by this request itself."""
        return self.shared_key(number, block_size) or (self.request_id, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A lognormal number of tokens, cut off at its ends."""

    mean: float  # of the distribution before it is cut off, >= 1
    median: float | None = None  # < mean; None: sigma is DEFAULT_SIGMA
    smallest: int = 1
    largest: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        """Return one length. A mean equal to the median is a constant."""
        sigma = DEFAULT_SIGMA
        if self.median is not None:
            sigma = math.sqrt(2.0 * math.log(self.mean / self.median))
        value = rng.lognormvariate(math.log(self.mean) - sigma * sigma / 2.0, sigma)
        return min(self.largest, max(self.smallest, round(value)))


def published_lengths(name: str) -> tuple[Lengths, Lengths]:
    """Return prompt and output lengths of a data set. Raises KeyError for an unknown name."""
    row = data_file("lengths.toml")["lengths"][name]

    def side(kind: str) -> Lengths:
        largest = row.get(f"{kind}_max", Lengths(mean=1.0).largest)
        return Lengths(mean=row[f"{kind}_mean"], median=row.get(f"{kind}_median"), largest=largest)

    return side("prompt"), side("output")


def constant_length(num_tokens: int) -> Lengths:
    return Lengths(mean=num_tokens, median=num_tokens)


# -- arrivals --------------------------------------------------------------------------------------


def gamma_gaps(rng: random.Random, *, rate_per_s: float, cv: float) -> Iterator[float]:
    """Yield gaps between arrivals with mean 1 / rate and this coefficient of variation.

    cv = 1 is a Poisson process, larger ones come in bursts.
    """
    shape = 1.0 / (cv * cv)
    while True:
        yield rng.gammavariate(shape, 1.0 / (rate_per_s * shape))


def burst_gaps(*, rate_per_s: float, size: int) -> Iterator[float]:
    """Yield gaps of `size` requests that come at once, every size / rate seconds."""
    while True:
        yield from [0.0] * (size - 1)
        yield size / rate_per_s


def drawn_requests(
    gaps_s: Iterable[float],
    lengths: tuple[Lengths, Lengths],
    *,
    num_requests: int,
    seed: int,
    level: ServiceLevel = NO_SERVICE_LEVEL,
) -> list[ArrivingRequest]:
    """Return requests whose lengths depend on the seed only, not on how they arrive."""
    rng, arrival_s, requests = random.Random(seed), 0.0, []
    for number, gap_s in zip(range(num_requests), gaps_s, strict=False):
        requests.append(
            ArrivingRequest(
                request_id=RequestId(f"r{number}"),
                arrival_s=arrival_s,
                num_prompt_tokens=lengths[0].draw(rng),
                num_output_tokens=lengths[1].draw(rng),
                level=level,
            )
        )
        arrival_s += gap_s
    return requests


def with_level(requests: Iterable[ArrivingRequest], level: ServiceLevel) -> list[ArrivingRequest]:
    return [replace(request, level=level) for request in requests]


def with_less_urgent(
    requests: Iterable[ArrivingRequest], frac: float, seed: int
) -> list[ArrivingRequest]:
    """Return requests of which so large a share is of priority 1, drawn one by one."""
    rng = random.Random(f"less urgent {seed}")
    return [replace(one, priority=1) if rng.random() < frac else one for one in requests]


def with_leavers(
    requests: Iterable[ArrivingRequest], frac: float, seed: int
) -> list[ArrivingRequest]:
    """Return requests of which so large a share has readers that leave: at `leaving_points`."""
    requests = list(requests)
    points = leaving_points([request.num_output_tokens for request in requests], frac, seed)
    pairs = zip(requests, points, strict=True)
    return [replace(request, leaves_after=point) for request, point in pairs]


def leaving_points(num_tokens: Iterable[int], frac: float, seed: int) -> list[int | None]:
    """Return after how many tokens of each answer its reader leaves; None: it stays.

    All points of an answer are as likely. Of two shares `frac` the readers that leave at the
    smaller one leave at the larger one, too, at the same points.
    """
    rng, points = random.Random(f"leavers {seed}"), list[int | None]()
    for number in num_tokens:
        leaves, part = rng.random() < frac, 1.0 - rng.random()
        points.append(math.ceil(part * number) if leaves else None)
    return points


def as_conversations(
    requests: list[ArrivingRequest], *, num_turns: int, gap_s: float
) -> list[ArrivingRequest]:
    """Return conversations of so many turns, by arrival.

    Each begins when the first of its requests arrives. Their prompts are its user's messages, sent
    `gap_s` after one another; a turn's prompt is all that was said before, and the message.
    """
    turns = []
    for first in range(0, len(requests), num_turns):
        num_said = 0
        for number, message in enumerate(requests[first : first + num_turns]):
            num_prompt = num_said + message.num_prompt_tokens
            turns.append(
                replace(
                    message,
                    arrival_s=requests[first].arrival_s + number * gap_s,
                    num_prompt_tokens=num_prompt,
                    conversation=requests[first].request_id,
                )
            )
            num_said = num_prompt + message.num_output_tokens
    return sorted(turns, key=lambda turn: turn.arrival_s)
