"""From a checked request to a live one: admission, quotas, progress, ending."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import TypeVar

import structlog

from services.gateway import metrics
from services.gateway.access.api_keys import current_account, current_caller, fair_key
from services.gateway.access.fairness import fairness_id
from services.gateway.access.quotas import Quotas
from services.gateway.access.terms import SloFloors
from services.gateway.checks import check_context, check_length
from services.gateway.errors import (
    ReaderStoppedError,
    TooManyRequestsError,
    UnknownRequestError,
    UnknownSessionError,
)
from services.gateway.executors.link import ExecutorLink
from services.gateway.live.failover.moves import Moves
from services.gateway.live.failover.rules import FailoverLimits
from services.gateway.live.generation import Generation
from services.gateway.live.pacer import Pacer
from services.gateway.live.placing import Placing
from services.gateway.live.reader import ReaderLimits
from services.gateway.live.reports import DeliveryReports
from services.gateway.live.request_trace import RequestTrace
from services.gateway.live.route import LiveRequest, Routes
from services.gateway.live.side_by_side import side_by_side
from services.gateway.types import (
    Delivery,
    GenerationRequest,
    RequestId,
    ServedModel,
    estimated_num_tokens,
)
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams
from services.kit.clock import Clock, wall_s
from services.kit.errors import InvalidRequestError, ServiceError, UnavailableError
from services.kit.rpc import own_request_id
from services.kit.telemetry.tracing import NO_TRACING, Tracing
from services.pacing.deposit import release_interval_s
from services.pacing.types import Release

log = structlog.get_logger()

T = TypeVar("T")

MAX_WATCH_INTERVAL_S = 1.0
SPARE_FRACTION = 16  # of all places one in so many is kept free of streams that only keep a pace
MAX_ASIDE = 16  # tokenisations at a time, which prompts of requests wait for
DRAINING_MESSAGE = "the gateway is shutting down"


class Phase(Enum):
    """What becomes of new requests."""

    SERVING = "serving"
    LEAVING = "leaving"  # they are taken, and should go elsewhere
    DRAINING = "draining"  # they are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    max_live_requests: int  # >= 1
    submit_timeout_s: float  # for an executor to accept or reject, > 0
    readers: ReaderLimits
    reader_timeout_s: float  # for a reader to take what was handed to it, > 0
    failover: FailoverLimits
    slo_floors: Mapping[str, SloFloors] = field(default_factory=dict)  # by model
    # At which answers are read whose clients state no pace, by model.
    reading_rates_tps: Mapping[str, float] = field(default_factory=dict)


class Dispatcher:
    """The core that both edges use. Owns the live requests of this gateway."""

    def __init__(
        self,
        links: Mapping[str, ExecutorLink],
        *,
        pacer: Pacer,
        reports: DeliveryReports,
        limits: DispatchLimits,
        clock: Clock,
    ) -> None:
        self._pacer = pacer
        self._limits = limits
        self._clock = clock
        self.tracing: Tracing = NO_TRACING  # makes the spans of requests
        self._live: dict[RequestId, LiveRequest] = {}
        timeout_s, routes = limits.submit_timeout_s, Routes(links, reports)
        self.moves = Moves(
            routes, self._live, limits=limits.failover, submit_timeout_s=timeout_s, clock=clock
        )
        self.placing = Placing(routes, self.moves, submit_timeout_s=timeout_s, rng=random.Random())
        # No key alone takes all places, unless it may.
        self._quotas = Quotas(default_max_live=max(1, limits.max_live_requests // 2))
        self._idle = asyncio.Event()
        self._idle.set()
        self._phase = Phase.SERVING
        self._num_aside = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_ready(self) -> bool:
        """Say whether requests should come here: an executor is connected, the gateway stays."""
        return not self.is_leaving and self.placing.is_possible

    @property
    def is_leaving(self) -> bool:
        """Say whether the gateway is about to end."""
        return self._phase is not Phase.SERVING

    def models(self) -> list[ServedModel]:
        """Return one entry per model, sorted, with the largest context that is served."""
        return self.placing.models()

    def default_sampling(self, model: str) -> SamplingParams:
        """Return what a request to `model` that names nothing gets."""
        infos = (info for info in self.models() if info.model == model)
        return next((info.default_sampling for info in infos), DEFAULT_SAMPLING)

    def template_variables(self, model: str) -> frozenset[str]:
        """Return what the chat template of `model` reads; empty: not known."""
        infos = (info for info in self.models() if info.model == model)
        return next((info.template_variables for info in infos), frozenset())

    def caches_prefixes(self, model: str) -> bool:
        """Return whether requests to `model` may begin with what earlier ones left; True where
        nothing is known of it.
        """
        infos = [info for info in self.models() if info.model == model]
        return not infos or any(info.caches_prefixes for info in infos)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Like `generate_all`, for one request."""
        async with self.generate_all([request]) as (generation,):
            yield generation

    @asynccontextmanager
    async def generate_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[Sequence[Generation]]:
        """Like `begin_all`; on leaving, whatever is not finished is aborted."""
        generations = await self.begin_all(requests)
        try:
            yield generations
        finally:
            for generation in generations:
                self.drop(generation)

    async def begin_all(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Have executors take all of `requests` or none; each is to be dropped by the caller. The
        requests differ in their ids, prompts and seeds; neighbours with the same prompt go to one
        executor, which prepares it once.

        Raises before anything reaches a client: OverloadedError above the limit of live requests,
        UnknownModelError, UnavailableError without an executor, DeadlineError without an answer in
        time, and what an executor refuses one of them for.
        """
        admitted = self._admit(requests)
        try:
            prompts = groupby(admitted, key=lambda live: live.generation.request.prompt)
            await side_by_side([self._place(list(answers)) for _, answers in prompts])
        except BaseException:
            for live in admitted:
                self.drop(live.generation)
            raise
        return [live.generation for live in admitted]

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Like `Placing.tokenize`. Admitted and charged as a request is; raises as `generate_all`
        does, ContextLengthError for a text that is far too long for the model; a conversation of
        any length is counted, for clients that want to know what to leave out of it.
        """
        num_tokens = estimated_num_tokens(prompt)
        if isinstance(prompt, TextPrompt):
            self._check_length(model, num_tokens)
        with self._aside(num_tokens):
            options = replace(options, fair_key=fair_key())
            return await self.placing.tokenize(model, prompt, options)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises as `tokenize` does."""
        self._check_length(model, len(ids))
        with self._aside(len(ids)):
            return await self.placing.detokenize(model, ids, fair_key=fair_key())

    async def release_session(self, session_id: str) -> int:
        """Have nothing be kept for a session of this caller's any more; return the tokens that
        were. Raises UnknownSessionError if none were.
        """
        with self._aside(0):
            num_tokens = await self.placing.release_session(current_account(), session_id)
        if not num_tokens:
            raise UnknownSessionError(session_id)
        return num_tokens

    @contextmanager
    def _aside(self, num_tokens: int) -> Iterator[None]:
        """Admit work for about so many tokens that the engine does not see."""
        if self._is_draining:
            raise UnavailableError(DRAINING_MESSAGE)
        if self._num_aside >= MAX_ASIDE:
            raise TooManyRequestsError(limit=MAX_ASIDE, num_free=0)
        caller = current_caller()
        self._quotas.enter(caller)
        self._num_aside += 1
        try:
            yield
        finally:
            self._num_aside -= 1
            self._quotas.leave(caller, num_tokens)

    def _check_length(self, model: str, num_tokens: int) -> None:
        for info in self.models():
            if info.model == model:
                check_length(num_tokens, info.max_model_len)

    def drop(self, generation: Generation) -> None:
        """Have nothing more to do with a request: abort it unless it is finished. Idempotent."""
        live = self._live.get(generation.request.request_id)
        if live is None or live.generation is not generation:
            return
        del self._live[generation.request.request_id]
        if generation.result == "abandoned":
            generation.left()
        generation.close()
        if live.route is not None:
            live.route.leave()
        self._quotas.leave(generation.caller, generation.num_tokens)
        metrics.LIVE_REQUESTS.dec()
        metrics.REQUESTS.labels(generation.result).inc()
        _record(generation)
        ttft_s, ttfat_s = generation.ttft_s, generation.ttfat_s
        live.trace.end(generation.result, generation.finish, ttft_s=ttft_s, ttfat_s=ttfat_s)
        if not self._live:
            self._idle.set()

    def named(self, request_id: RequestId) -> list[LiveRequest]:
        """Return the caller's live requests of a name. Raises UnknownRequestError without one."""
        caller = current_caller()
        named = [live for live in self._live.values() if request_id in live.names]
        if named := [live for live in named if live.generation.caller == caller]:
            return named
        raise UnknownRequestError(f'no live request has the id "{request_id}"')

    def cancel(self, request_id: RequestId) -> None:
        """End requests of a name, all their answers, as cancelled. Raises as `named` does."""
        for live in self.named(request_id):
            live.generation.cancel()
            self.placing.abort(live.generation.request.request_id)

    async def watch_readers(self) -> None:
        """End requests whose readers take nothing, until cancelled; one loop for all of them. Those
        of resumable ones may come back.
        """
        timeout_s = self._limits.reader_timeout_s
        while True:
            await asyncio.sleep(min(timeout_s / 4, MAX_WATCH_INTERVAL_S))
            now_s = self._clock()
            for live in self.live_requests():
                generation = live.generation
                is_resumable = generation.request.is_resumable
                if not is_resumable and generation.reader_stopped_for_s(now_s) >= timeout_s:
                    log.info("reader_stopped", request_id=generation.request.request_id)
                    generation.give_up(ReaderStoppedError("the reader has stopped reading"))
                    self.drop(generation)

    def live_requests(self) -> list[LiveRequest]:
        """Return all requests that have not ended; from whatever thread."""
        return list(self._live.values())

    def start_leaving(self) -> None:
        """Go on, and not be ready any more: whoever sends requests shall send them elsewhere."""
        self._phase = Phase.LEAVING

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._phase = Phase.DRAINING

    @property
    def _is_draining(self) -> bool:
        return self._phase is Phase.DRAINING

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """End every live request with an error; tokens that are here go out first."""
        for live in self.live_requests():
            live.generation.fail(UnavailableError(DRAINING_MESSAGE))

    def _admit(self, requests: Sequence[GenerationRequest]) -> list[LiveRequest]:
        """Make all of `requests` live, or raise why not."""
        if self._is_draining:
            raise UnavailableError(DRAINING_MESSAGE)
        limit, num_free = (
            self._limits.max_live_requests,
            self._limits.max_live_requests - self.num_live,
        )
        self._make_room(len(requests) + limit // SPARE_FRACTION - num_free)
        if len(requests) > limit:
            raise InvalidRequestError(f"n: at most {limit} answers can be asked for", field="n")
        if len(requests) > num_free:
            raise TooManyRequestsError(limit=limit, num_free=num_free)
        self._check_context(requests)
        self.check_terms(requests)
        self._quotas.enter(current_caller(), len(requests))
        at_s = wall_s()  # the same for all answers to a prompt, which is rendered once
        asked = [replace(request, rendered_at_s=at_s) for request in requests]
        return [self._enter(self._as_read(request)) for request in asked]

    def _make_room(self, num_wanted: int) -> None:
        """Have streams that only keep their pace end it, the oldest first, for others to come in:
        whoever asks for a tail has no right to its place.
        """
        for live in self.live_requests() if num_wanted > 0 else ():
            if num_wanted > 0 and live.generation.keeps_its_pace:
                live.generation.end_pace()
                num_wanted -= 1

    def _check_context(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise ContextLengthError for a request that no executor of its model has room for."""
        lengths = {info.model: info.max_model_len for info in self.models()}
        for request in requests:
            if request.model in lengths:
                check_context(request, lengths[request.model])

    def check_terms(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise InvalidRequestError for what this caller may not ask for; a key's own floors win
        over the model's.
        """
        caller = current_caller()
        for request in requests:
            floors = self._floors(request.model)
            if caller is not None:
                caller.priority(request.priority, request.priority_name)
                floors = caller.over(floors)
            floors.check(request.service_level)

    def _floors(self, model: str) -> SloFloors:
        return self._of_model(model, self._limits.slo_floors) or SloFloors()

    def _of_model(self, model: str, stated: Mapping[str, T]) -> T | None:
        """Return what is stated of a model, or of what it adapts, where nothing is of its own."""
        parents = (info.parent for info in self.models() if info.model == model and info.parent)
        names = [model, *parents] if stated else []
        return next((stated[name] for name in names if name in stated), None)

    def _as_read(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with the rate at which its answer is read while it comes: at none if it
        comes whole; as the operator says, where its client states no pace, a key's own before the
        model's. Nothing is kept back for that.
        """
        level, caller = request.service_level, current_caller()
        if request.delivery is Delivery.WHOLE:
            level = replace(level, consumption_rate_tps=None, max_in_hand_s=None)
            return replace(request, service_level=level)
        if release_interval_s(level) or not request.is_for_reading:
            return request
        rate_tps = caller and caller.default_reading_rate_tps
        if rate_tps is None:
            rate_tps = self._of_model(request.model, self._limits.reading_rates_tps)
        if not rate_tps:
            return request
        release = level.release or Release.AT_ONCE
        level = replace(level, consumption_rate_tps=rate_tps, release=release)
        return replace(request, service_level=level)

    def _enter(self, request: GenerationRequest) -> LiveRequest:
        names = request.ids
        # Clients' names for requests may meet, here and at other gateways: executors and the
        # tracker know each request by an id of its own.
        own_id = RequestId(own_request_id(request.request_id))
        caller = current_caller()
        request = replace(
            request,
            request_id=own_id,
            tenant=current_account(),
            fair_key=fair_key(),
            fairness_id=fairness_id(request.fairness_id),
            priority=caller.priority(request.priority) if caller else request.priority or 0,
        )
        generation = Generation(
            request,
            pacer=self._pacer,
            clock=self._clock,
            arrived_s=self._clock(),
            limits=self._limits.readers,
        )
        trace = RequestTrace(request, self.tracing)
        live = LiveRequest(generation=generation, names=names, trace=trace)
        self._live[own_id] = live
        self._idle.clear()
        metrics.LIVE_REQUESTS.inc()
        return live

    async def _place(self, answers: Sequence[LiveRequest]) -> None:
        """Have one executor take all answers to a prompt."""
        try:
            await self.placing.place(answers, is_draining=lambda: self._is_draining)
        except ServiceError as error:
            for live in answers:
                live.generation.fail(error)
            raise


def _record(generation: Generation) -> None:
    """Write down what an ended request has cost, and at which key's expense."""
    num_prompt, num_begun = generation.num_prompt_tokens, generation.request.num_begun_tokens
    num_output = generation.num_tokens - num_prompt
    whose: dict[str, str] = {}
    if generation.caller is not None:
        whose["api_key"] = name = generation.caller.name
        metrics.KEY_TOKENS.labels(name, "prompt").inc(num_prompt + min(num_begun, num_output))
        metrics.KEY_TOKENS.labels(name, "output").inc(max(0, num_output - num_begun))
    log.info(
        "request_ended",
        request_id=generation.request.request_id,
        result=generation.result,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        **whose,
    )
