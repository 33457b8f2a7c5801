"""Brings requests on whose executors were lost, or are leaving."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from services.gateway import metrics
from services.gateway.errors import (
    CannotResumeError,
    DuplicateRequestError,
    EngineFailedError,
    EngineStalledError,
    GenerationFailedError,
    LeavingError,
    LinkBrokenError,
)
from services.gateway.executors.routing import Candidate
from services.gateway.live.failover.rules import (
    BACK_S,
    IS_SUSPECT,
    MAX_COUNTS,
    Closed,
    FailoverLimits,
    LostAnswer,
    MoveCause,
    Step,
    Trial,
    Verdict,
    cause_of_move,
    decide,
    how_continued,
)
from services.gateway.live.losses import life_of, may_live
from services.gateway.live.route import LiveRequest, Route, Routes
from services.gateway.types import Continued, Delivery, RequestId
from services.kit.clock import Clock
from services.kit.errors import DeadlineError, OverloadedError, ServiceError, UnavailableError

log = structlog.get_logger()

MAX_UNDER_WAY = 32
LOOK_INTERVAL_S = 0.05  # while requests wait
IDLE_INTERVAL_S = 0.25  # else; until it is noticed that an executor leaves
RETRY_S = 0.5  # after which an executor that had no room is asked again
MOVABLE = (LinkBrokenError, EngineFailedError, LeavingError)
FOR_NOW = (UnavailableError, OverloadedError, DeadlineError, DuplicateRequestError)


@dataclass(slots=True, kw_only=True)
class _Loss:
    """A request that is between executors."""

    error: ServiceError
    since_s: float
    lost_s: float  # >= since_s: the newest of several losses without a token between them
    lost_at: str
    asked_at: str = ""  # the executor that is to take it; empty: none is asked
    asked_s: float = 0.0
    never: set[str] = field(default_factory=set)  # executors that cannot have it
    not_before_s: dict[str, float] = field(default_factory=dict)  # others, that may have it later
    refusal: str = ""

    @property
    def cause(self) -> MoveCause:
        return cause_of_move(self.error)


class Moves:
    """Keeps the requests of all routes. Those whose readers run dry first go first."""

    def __init__(
        self,
        routes: Routes,
        live: Mapping[RequestId, LiveRequest],
        *,
        limits: FailoverLimits,
        submit_timeout_s: float,
        clock: Clock,
    ) -> None:
        """`live` are all requests that are not dropped. `submit_timeout_s`: for an executor to
        accept or reject, > 0.
        """
        self._routes = routes
        self._live = live
        self._limits = limits
        self._submit_timeout_s = submit_timeout_s
        self._clock = clock
        self._lost: dict[RequestId, _Loss] = {}
        self._failed_s: dict[str, float] = {}  # when an executor last gave up on a request
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Look after lost requests until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S if self._lost else IDLE_INTERVAL_S):
                    await self._news.wait()
            self._news.clear()
            try:
                self._acquit()
                self._call_off()
                self._look()
            except Exception:
                log.exception("moves_crashed")

    def taken(self, route: Route) -> None:
        live = self._live.get(RequestId(route.ref.request_id))
        route.is_taken = True
        if live is None or not live.generation.num_prompt_tokens:
            return  # it is gone, or was cancelled before anything of it was done
        before, live.home = live.home, live.asked
        num_there = max(live.generation.num_generated, live.generation.request.num_begun_tokens)
        live.started_s, live.num_at_start = self._clock(), num_there
        live.generation.continuation.begun_s = None
        live.is_called_off = False
        self._routes.register(route, live.generation)
        loss = self._lost.pop(RequestId(route.ref.request_id), None)
        if loss is not None:
            self._note_moved(live, loss, before)
            self._news.set()

    def lost(self, route: Route, error: ServiceError) -> ServiceError | None:
        if isinstance(error, EngineFailedError):
            self._failed_s[route.link.address] = self._clock()
        request_id = RequestId(route.ref.request_id)
        live, loss = self._live.get(request_id), self._lost.get(request_id)
        if live is None:
            return error
        if loss is not None:
            return self._refused(live, loss, error)
        if live.home is None or not isinstance(error, MOVABLE):
            return error
        if isinstance(error, LeavingError) and not live.is_called_off:
            return error
        route.end()
        return self.take(live, error)

    def take(self, live: LiveRequest, error: ServiceError) -> ServiceError | None:
        """Take over a request that has lost its executor. Returns what ends it; None: it goes on,
        or waits for an executor that takes it.
        """
        now_s, continuation = self._clock(), live.generation.continuation
        self._count(live, error, now_s)
        live.is_called_off = False
        if continuation.gap_since_s is None:
            continuation.gap_since_s = now_s
        assert live.route is not None
        loss = _Loss(
            error=error,
            since_s=continuation.gap_since_s,
            lost_s=now_s,
            lost_at=live.route.link.address,
        )
        loss.not_before_s[loss.lost_at] = now_s + RETRY_S
        self._lost[live.generation.request.request_id] = loss
        return self._ending(live, loss)

    def _count(self, live: LiveRequest, error: ServiceError, now_s: float) -> None:
        """Count a loss against a request that was new at its executor; else it has proved well.
        While an engine hangs no trial ends.
        """
        if isinstance(error, LeavingError):
            return
        at_s = live.started_s if isinstance(error, EngineStalledError) else now_s
        count = 1.0 if live.home is None else _trial(live, at_s).count
        live.num_at_loss = max(live.num_at_loss, live.generation.num_generated)
        if count:
            live.losses.add(count, may_live(error, live.home or live.asked))
        else:
            live.losses.clear()

    def _refused(self, live: LiveRequest, loss: _Loss, error: ServiceError) -> ServiceError | None:
        """Take in that an executor that was asked has not taken a request. Returns as `take`."""
        address, loss.asked_at = loss.asked_at, ""
        match error:
            case GenerationFailedError():
                return self._end(live, loss, error)
            case LinkBrokenError() | EngineFailedError():
                loss.error, loss.lost_at = error, address
                loss.lost_s = self._clock()
                live.losses.add(1.0, may_live(error, live.asked))
            case CannotResumeError():
                loss.never.add(address)
                loss.refusal = str(error)
            case _ if isinstance(error, FOR_NOW):
                loss.not_before_s[address] = self._clock() + RETRY_S
                loss.refusal = str(error)
            case _:
                loss.never.add(address)
                loss.refusal = str(error)
        return self._ending(live, loss)

    def _ending(self, live: LiveRequest, loss: _Loss) -> ServiceError | None:
        """Return what ends a request for which there is nothing to be hoped for."""
        self._news.set()
        verdict = self._verdict(live, loss)
        return self._given_up(live, loss, verdict) if verdict.step is Step.GIVE_UP else None

    def _look(self) -> None:
        """Ask executors for those that wait, as many at a time as may be under way."""
        num_free = MAX_UNDER_WAY - self._num_under_way if self._routes.candidates() else 0
        for request_id in sorted(self._lost, key=self._dry_s):
            live, loss = self._live.get(request_id), self._lost[request_id]
            if live is None or live.generation.is_over:
                del self._lost[request_id]
            elif loss.asked_at:
                self._look_at_asked(live, loss)
            elif num_free > 0 or self._clock() - loss.since_s >= self._limits.timeout_s:
                num_free -= self._look_at_waiting(live, loss)

    def _look_at_asked(self, live: LiveRequest, loss: _Loss) -> None:
        if self._clock() - loss.asked_s < self._submit_timeout_s:
            return
        assert live.route is not None
        live.route.link.abandon(live.generation.request.request_id)
        self._refuse(live, loss, DeadlineError("the executor did not answer in time"))

    def _look_at_waiting(self, live: LiveRequest, loss: _Loss) -> bool:
        """Say whether an executor has been asked."""
        verdict = self._verdict(live, loss)
        if verdict.step is Step.GIVE_UP:
            live.generation.fail(self._given_up(live, loss, verdict))
        elif verdict.to is not None:
            self._ask(live, loss, verdict)
        return verdict.to is not None

    def _ask(self, live: LiveRequest, loss: _Loss, verdict: Verdict) -> None:
        assert verdict.to is not None
        if verdict.step is Step.BEGIN_AGAIN:
            live.generation.begin_again()
        else:
            self._have_compared(live, verdict.to)
        loss.asked_at, loss.asked_s = verdict.to.address, self._clock()
        try:
            self._routes.submit(verdict.to.address, [live], self)
        except ServiceError as error:
            self._refuse(live, loss, error)

    def _have_compared(self, live: LiveRequest, to: Candidate) -> None:
        """Have the last tokens generated again, where they must be the same."""
        generation, home = live.generation, live.home
        assert home is not None
        request = generation.request
        how = how_continued(home, to, request.model, request.sampling)
        is_exact = Continued.VALID not in (how, generation.continuation.continued)
        generation.continuation.overlap(self._limits.num_overlap if is_exact else 0)

    def _refuse(self, live: LiveRequest, loss: _Loss, error: ServiceError) -> None:
        final = self._refused(live, loss, error)
        if final is not None:
            live.generation.fail(final)

    def _acquit(self) -> None:
        """Take back what counts against requests for executors that are found alive."""
        unsure = [live for live in self._live.values() if not live.losses.is_sure]
        lives = [life_of(one) for one in self._routes.candidates()] if unsure else []
        for life in filter(None, lives):
            for live in unsure:
                live.losses.found_alive(life)

    def _call_off(self) -> None:
        """Abort requests at executors that are leaving: those ends say how many tokens there are,
        with which they go on elsewhere.
        """
        leaving = {link.address for link in self._routes.links.values() if link.is_leaving}
        if not leaving or self._limits.timeout_s <= 0 or not self._routes.candidates():
            return
        num_free = MAX_UNDER_WAY - self._num_under_way
        for request_id in sorted(self._live, key=self._dry_s):
            live = self._live[request_id]
            route = live.route
            if route is None or not route.is_taken or route.link.address not in leaving:
                continue
            if live.is_called_off or live.generation.is_over or request_id in self._lost:
                continue
            if num_free <= 0:
                return
            now_s, address = self._clock(), route.link.address
            loss = _Loss(error=LeavingError(), since_s=now_s, lost_s=now_s, lost_at=address)
            if self._verdict(live, loss).to is not None:
                live.is_called_off = True
                num_free -= 1
                route.link.abort(request_id)

    def _verdict(self, live: LiveRequest, loss: _Loss) -> Verdict:
        generation, now_s = live.generation, self._clock()
        answer = LostAnswer(
            model=generation.request.model,
            is_whole=generation.request.delivery is Delivery.WHOLE,
            num_tokens=generation.num_generated,
            is_complete=generation.continuation.is_complete,
            num_prompt_tokens=generation.num_prompt_tokens,
            max_tokens=generation.continuation.max_tokens,
            home=live.home,
            lost_at=loss.lost_at,
            num_counts=live.losses.total,
            is_sure=live.losses.is_sure or now_s - loss.lost_s >= BACK_S,
            waited_s=now_s - loss.since_s,
            refusal=loss.refusal,
        )
        return decide(
            answer,
            self._routes.candidates(),
            self._limits,
            closed=Closed(
                never=loss.never,
                not_now={address for address, at_s in loss.not_before_s.items() if now_s < at_s},
                tries={*self._tried_at(live, now_s)} if live.losses.total >= IS_SUSPECT else (),
            ),
        )

    def _tried_at(self, live: LiveRequest, now_s: float) -> Iterator[str]:
        """Yield the executors at which another request that may have killed one is on trial, and
        those that have just given up on one: their engines may be dead though their links last.
        """
        yield from (at for at, at_s in self._failed_s.items() if now_s - at_s < BACK_S)
        for request_id, other in self._live.items():
            if other is live or other.losses.total < IS_SUSPECT or other.generation.is_over:
                continue
            loss = self._lost.get(request_id)
            if loss is not None:
                if loss.asked_at:
                    yield loss.asked_at
            elif other.home is not None and _trial(other, now_s).is_on:
                yield other.home.address

    @property
    def _num_under_way(self) -> int:
        called_off = sum(
            live.is_called_off and not live.generation.is_over for live in self._live.values()
        )
        return called_off + sum(bool(loss.asked_at) for loss in self._lost.values())

    def _dry_s(self, request_id: RequestId) -> float:
        live = self._live.get(request_id)
        return 0.0 if live is None else live.generation.runs_dry_s

    def _given_up(self, live: LiveRequest, loss: _Loss, verdict: Verdict) -> ServiceError:
        """Return what ends a request, and why it could not go on."""
        if live.losses.total >= MAX_COUNTS:
            return self._end(live, loss, GenerationFailedError(verdict.why))
        error = type(loss.error)(f"{loss.error}; it could not go on elsewhere: {verdict.why}")
        return self._end(live, loss, error)

    def _end(self, live: LiveRequest, loss: _Loss, error: ServiceError) -> ServiceError:
        request_id = live.generation.request.request_id
        self._lost.pop(request_id, None)
        metrics.MOVES.labels(loss.cause.value, Step.GIVE_UP.value).inc()
        log.warning(
            "request_not_moved",
            request_id=request_id,
            cause=loss.cause.value,
            address=loss.lost_at,
            detail=str(error),
        )
        return error

    def _note_moved(self, live: LiveRequest, loss: _Loss, before: Candidate | None) -> None:
        """Write down that an executor has taken a lost request, which `before` had; None: none."""
        generation, home = live.generation, live.home
        assert home is not None
        request = generation.request
        how = how_continued(before or home, home, request.model, request.sampling)
        goes_on = before is not None and generation.num_generated
        step = Step.CONTINUE if goes_on else Step.BEGIN_AGAIN
        generation.continuation.moved(how)
        metrics.MOVES.labels(loss.cause.value, step.value).inc()
        told = {
            "cause": loss.cause.value,
            "result": step.value,
            "from_address": loss.lost_at,
            "to_address": home.address,
            "num_tokens": generation.num_generated,
            "waited_s": round(self._clock() - loss.since_s, 3),
        }
        log.info("request_moved", request_id=generation.request.request_id, **told)
        live.trace.moved(told)


def _trial(live: LiveRequest, now_s: float) -> Trial:
    begun_s = live.generation.continuation.begun_s
    return Trial(
        num_tokens=max(0, live.generation.num_generated - live.num_at_start),
        since_taken_s=now_s - live.started_s,
        since_token_s=0.0 if begun_s is None else now_s - begun_s,
        is_suspect=live.losses.total >= IS_SUSPECT,
        num_again=max(0, live.num_at_loss - live.num_at_start),
    )
