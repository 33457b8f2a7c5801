"""What becomes of an answer whose executor was lost. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from services.gateway.errors import EngineFailedError, LeavingError, LinkStalledError
from services.gateway.executors.routing import Candidate, expected_wait_s
from services.gateway.types import Continued
from services.generation.sampling_params import SamplingParams
from services.kit.errors import ServiceError

TRIAL_TOKENS = 32
TRIED_TOKENS = 4  # of a suspect, beyond those that it had when executors were lost
TRIAL_S = 2.0  # from its first token there on
BACK_S = 1.0  # from a loss on, in which a link that was cut is there again
MAX_TRIAL_S = 10.0  # without any: it waits for its turn, or for its reader
IS_SUSPECT = 1.0  # counts, from which a request is tried with no other such one beside it
MAX_COUNTS = 2.0  # with which it is taken for the cause of the losses
POISON = "executors were lost, or gave up on it, twice when they had just begun with the request"


class MoveCause(Enum):
    """Why an answer is without an executor."""

    LINK = "link"  # the connection is gone, and may be the executor with it
    ENGINE = "engine"  # the executor gave up on it
    STALL = "stall"  # the executor hangs
    LEAVING = "leaving"  # the executor shuts down


class Step(Enum):
    """What to do with it."""

    CONTINUE = "continued"
    BEGIN_AGAIN = "begun_again"
    GIVE_UP = "given_up"
    WAIT = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLimits:
    """Which answers move, and for how long an executor is looked for."""

    timeout_s: float = 60.0  # 0: answers that were begun end with an error, others do not wait
    max_kept_tokens: int = 1 << 17  # of an answer that moves; ids take 4 bytes each, >= 0
    across_numerics: bool = True  # also between executors that round differently
    num_overlap: int = 0  # tokens that are generated again and compared, >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a request does at its executor, which may be lost to it."""

    num_tokens: int  # that it had there
    since_taken_s: float  # since the executor took it
    since_token_s: float  # since the first of the tokens; 0 without one
    is_suspect: bool = False  # it is here alone among those that executors may have been lost to
    num_again: int = 0  # tokens that it had elsewhere, behind those with which it began here

    @property
    def num_needed(self) -> int:
        """Return with how many tokens it has proved well. One that executors are lost to at a token
        has them lost at that one again.
        """
        needed = self.num_again + TRIED_TOKENS if self.is_suspect else TRIAL_TOKENS
        return min(needed, TRIAL_TOKENS)

    @property
    def count(self) -> float:
        """Return what the loss of the executor counts against the request; 0: it has proved well.

        One without a token for long may have waited for its turn as well as have been what ran: it
        counts half, so that no single loss sets all of a queue apart.
        """
        if self.num_tokens >= self.num_needed:
            return 0.0
        if self.num_tokens:
            return 1.0 if self.since_token_s < TRIAL_S else 0.0
        return 1.0 if self.since_taken_s < (MAX_TRIAL_S if self.is_suspect else TRIAL_S) else 0.5

    @property
    def is_on(self) -> bool:
        """Say whether no other suspect is to be beside the request."""
        return self.count > 0 and (self.num_tokens > 0 or self.since_taken_s < MAX_TRIAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostAnswer:
    """An answer without an executor."""

    model: str
    is_whole: bool  # its reader gets it when it is complete, and has nothing of it
    num_tokens: int  # of the answer, so far
    is_complete: bool  # the ids of all of them are known
    num_prompt_tokens: int  # 0: not known
    max_tokens: int  # of the whole answer; 0: not known
    home: Candidate | None  # the executor that had it; None: none had taken it
    lost_at: str  # address of the executor that was lost last
    num_counts: float = 0.0  # losses while it was on trial, by `Trial.count`
    is_sure: bool = True  # no executor may soon be found alive whose loss counts
    waited_s: float = 0.0  # since its first loss without a token after it
    refusal: str = ""  # the newest one's words; empty: no executor has refused it

    @property
    def may_begin_again(self) -> bool:
        """Say whether nothing of it has been handed to a reader."""
        return self.is_whole or not self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The addresses of executors that are not to be asked."""

    never: Collection[str] = ()  # they have refused the answer for good
    not_now: Collection[str] = ()  # they had no room, or have only just been lost
    tries: Collection[str] = ()  # another request is on trial there, and this one would be


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with an answer, where, or why nothing can be done."""

    step: Step
    to: Candidate | None = None  # to continue or begin again
    why: str = ""  # to give up


WAIT = Verdict(Step.WAIT)
NONE_CLOSED = Closed()


def cause_of_move(error: ServiceError) -> MoveCause:
    """Return why an executor was lost, from what ended the request there."""
    match error:
        case LinkStalledError():
            return MoveCause.STALL
        case LeavingError():
            return MoveCause.LEAVING
        case EngineFailedError():
            return MoveCause.ENGINE
    return MoveCause.LINK


def how_continued(
    before: Candidate, after: Candidate, model: str, sampling: SamplingParams
) -> Continued:
    """Return what an answer is that goes on, or begins again, at another executor. What is drawn
    without a seed, or with one beside drafts, might have been another one there, too.
    """
    makes_drafts = before.makes_drafts or after.makes_drafts
    if sampling.temperature and (sampling.seed is None or makes_drafts):
        return Continued.VALID
    is_same = before.fingerprints.get(model) == after.fingerprints.get(model)
    is_alike = is_same and before.numerics == after.numerics
    is_repeatable = before.is_repeatable and after.is_repeatable
    return Continued.IDENTICAL if is_alike and is_repeatable else Continued.VALID


def decide(
    answer: LostAnswer,
    candidates: Sequence[Candidate],
    limits: FailoverLimits,
    *,
    closed: Closed = NONE_CLOSED,
) -> Verdict:
    """Say what to do with an answer, `candidates` being the executors that are connected."""
    if answer.num_counts >= MAX_COUNTS:
        if not answer.is_sure:
            return WAIT
        return Verdict(Step.GIVE_UP, why=POISON)
    reason = _why_it_stays(answer, limits)
    may_begin = answer.may_begin_again and (limits.timeout_s > 0 or not answer.num_tokens)
    if reason and not may_begin:
        return Verdict(Step.GIVE_UP, why=reason)
    able = [one for one in candidates if answer.model in one.models and _has_room(answer, one)]
    alike = [] if reason else [one for one in able if _is_alike(answer, one, limits)]
    for step, fit in ((Step.CONTINUE, alike), (Step.BEGIN_AGAIN, able if may_begin else [])):
        free = [one for one in fit if _is_free(one.address, closed)]
        if free:
            return Verdict(step, to=_least_loaded(free, but=answer.lost_at))
    fit = able if may_begin else alike
    if any(one.address in closed.tries for one in fit):
        return WAIT  # its turn comes, however many are before it
    is_refused = bool(fit) and all(one.address in closed.never for one in fit)
    if is_refused or answer.waited_s >= limits.timeout_s:
        return Verdict(Step.GIVE_UP, why=answer.refusal or _what_lacks(fit))
    return WAIT


def _why_it_stays(answer: LostAnswer, limits: FailoverLimits) -> str:
    """Say why an answer cannot be continued anywhere; empty: it can."""
    if not answer.num_tokens:
        return "nothing of it is there"
    if limits.timeout_s <= 0:
        return "answers do not move here"
    if not answer.is_complete:
        return f"it has more than {limits.max_kept_tokens} tokens"
    if answer.home is None or not answer.home.fingerprints.get(answer.model):
        return "its executor does not say what it takes to go on with it"
    if not answer.max_tokens:
        return "its executor does not say how long it may be"
    return ""


def _has_room(answer: LostAnswer, candidate: Candidate) -> bool:
    return answer.num_prompt_tokens + answer.max_tokens <= candidate.max_model_len


def _is_alike(answer: LostAnswer, candidate: Candidate, limits: FailoverLimits) -> bool:
    home = answer.home
    if home is None or candidate.fingerprints.get(answer.model) != home.fingerprints[answer.model]:
        return False
    return limits.across_numerics or candidate.numerics == home.numerics


def _is_free(address: str, closed: Closed) -> bool:
    return not any(address in one for one in (closed.never, closed.not_now, closed.tries))


def _least_loaded(candidates: Sequence[Candidate], *, but: str) -> Candidate:
    """Return the one of the least wait; that at the address `but` only if it is alone."""
    others = [one for one in candidates if one.address != but]
    return min(others or candidates, key=lambda one: (expected_wait_s(one), one.num_inflight))


def _what_lacks(fit: Sequence[Candidate]) -> str:
    if fit:
        return "no executor took it in time"
    return "no executor that could go on with it is connected"
