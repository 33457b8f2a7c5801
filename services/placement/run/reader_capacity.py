"""How many requests an engine has that are read at once, and what keeps it from more.

By the promise that the policy itself gives, of requests that are alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.placement.blocks import side_blocks
from services.placement.run.promise import Limit, Promise, can_take_turns
from services.placement.run.types import RunPhase, RunRequest, RunSnapshot, StepCosts
from services.placement.types import EngineShape, RequestId

READING_RATE_TPS = 5.0  # of people: Brysbaert's 238 words per minute are 5.2 tokens per second
GB = 1e9
BOUNDLESS = 1 << 62  # blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersAlike:
    """What each reader asks for, again and again: one answer is read, then comes the next."""

    num_prompt_tokens: int  # >= 1
    num_output_tokens: int  # >= 1
    rate_tps: float = READING_RATE_TPS  # > 0
    tokens_per_step: float = 1.0  # that a decode step brings each, >= 1

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def halfway(self) -> RunRequest:
        """The mean request: half of its answer is there."""
        num_there = self.num_output_tokens // 2
        return RunRequest(
            request_id=RequestId("reader"),
            phase=RunPhase.RUNNING,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=num_there,
            max_tokens=self.num_output_tokens,
            num_host_tokens=0,
            num_computed_tokens=self.num_prompt_tokens + num_there,
            rate_tps=self.rate_tps,
            tokens_per_step=self.tokens_per_step,
            slack_s=0.0,
            arrival_age_s=0.0,
            run_age_s=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderCapacity:
    """What an engine has room for, in requests of `num_tokens` each, answers included."""

    num_tokens: int
    rate_tps: float  # at which each is read
    num_held: int  # that the pool and the seats hold at once
    num_kept: int  # of which the host keeps copies
    num_sustained: int  # that pool, seats and link would sustain, >= num_held
    limit: Limit  # what keeps `num_sustained` from being more
    host_bytes: int
    wanted_host_bytes: int  # for copies of all that are sustained; 0: copies bring no more readers

    @property
    def num_readers(self) -> int:
        """Readers at once: no more than are held, where the host cannot keep more."""
        return max(self.num_held, min(self.num_sustained, self.num_kept))

    @property
    def binds(self) -> Limit:
        """What keeps readers from being more."""
        return Limit.HOST if self.num_readers < self.num_sustained else self.limit

    def in_words(self) -> str:
        """Return a sentence for sizing a machine."""
        readers = (
            f"{self.num_readers} requests of {self.num_tokens:,} tokens are read at once at "
            f"{self.rate_tps:g} tokens/s (limit: {self.binds}). The pool holds {self.num_held}"
        )
        if not self.wanted_host_bytes:
            return f"{readers}; turns would bring no more"
        kept = f"{readers}, {_gb(self.host_bytes)} of host memory keep {self.num_kept}"
        if self.binds is not Limit.HOST:
            return kept
        return f"{kept}; {_gb(self.wanted_host_bytes)} would keep {self.num_sustained}"


def reader_capacity(
    engine: EngineShape, costs: StepCosts, readers: ReadersAlike, *, link_bytes_per_s: float
) -> ReaderCapacity:
    """Return how many readers that ask again when they have read are served at once.

    `link_bytes_per_s`: from host to pool, > 0. The prompts of those that ask again take their share
    of the time.
    """
    halfway = readers.halfway

    def limit(num_readers: int) -> Limit | None:
        asked_per_s = num_readers * readers.rate_tps / readers.num_output_tokens
        members = [halfway] * num_readers
        snapshot = RunSnapshot(
            requests=(halfway,),
            engine=replace(engine, num_host_blocks=BOUNDLESS),
            costs=costs,
            h2d_bytes_per_s=link_bytes_per_s,
            h2d_queued_bytes=0,
            prefill_frac=min(1.0, asked_per_s * costs.prompt_s(readers.num_prompt_tokens)),
            mean_answer_tokens=readers.num_output_tokens,
        )
        takes_turns = can_take_turns(snapshot, members)
        return Promise(snapshot).limit(members) if takes_turns else Limit.POOL

    ahead = 1 + engine.max_ahead_tokens
    num_rows = readers.num_tokens + ahead
    num_blocks = engine.num_groups * -(-num_rows // engine.block_size)
    num_blocks += side_blocks(engine.geometry, num_tokens=num_rows, num_new_tokens=ahead)
    num_held = min(engine.max_num_seqs, engine.num_blocks // num_blocks)
    most, what = _most(limit)
    return ReaderCapacity(
        num_tokens=readers.num_tokens,
        rate_tps=readers.rate_tps,
        num_held=num_held,
        num_kept=engine.num_host_blocks // num_blocks,
        num_sustained=max(num_held, most),
        limit=what,
        host_bytes=engine.num_host_blocks * engine.block_bytes,
        wanted_host_bytes=most * num_blocks * engine.block_bytes if most > num_held else 0,
    )


def _most(limit: Callable[[int], Limit | None]) -> tuple[int, Limit]:
    """Return the most readers that nothing limits, and what limits one more.

    By doubling and bisection: where so many are limited, more are.
    """
    low, high = 0, 1
    while (what := limit(high)) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = limit(middle)
        if found is None:
            low = middle
        else:
            high, what = middle, found
    return low, what


def _gb(num_bytes: int) -> str:
    number = num_bytes / GB
    return f"{number:,.{0 if number >= 10 else 1}f} GB"
