"""From a checked request to a live one: admission, routing, acceptance, progress, ending."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from services.gateway import convert, metrics
from services.gateway.access.api_keys import current_caller
from services.gateway.access.quotas import Quotas
from services.gateway.checks import check_context
from services.gateway.errors import (
    DuplicateRequestError,
    ReaderStoppedError,
    TooManyRequestsError,
    UnknownModelError,
    UnknownRequestError,
)
from services.gateway.executors.link import ExecutorLink
from services.gateway.executors.routing import Candidate, RoutingGenerations, choose_executor
from services.gateway.live.generation import Generation
from services.gateway.live.pacer import Pacer
from services.gateway.live.reports import DeliveryReports
from services.gateway.live.request_trace import RequestTrace
from services.gateway.live.side_by_side import side_by_side
from services.gateway.types import GenerationRequest, ModelInfo, RequestId
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.kit import clock as clocks
from services.kit import rpc
from services.kit.clock import Clock
from services.kit.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from services.kit.tracing import NO_TRACING, Tracing
from services.reporting.ledger import RequestRef

log = structlog.get_logger()

MAX_WATCH_INTERVAL_S = 1.0
DRAINING_MESSAGE = "the gateway is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    max_live_requests: int  # >= 1
    submit_timeout_s: float  # for an executor to accept or reject, > 0
    max_undelivered_tokens: int  # due and not taken by a reader, from which it is held, >= 1
    reader_timeout_s: float  # for a reader to take what was handed to it, > 0


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a live request is."""

    link: ExecutorLink
    ref: RequestRef


class Dispatcher:
    """The core that both edges use. Owns the live requests of this gateway."""

    def __init__(
        self,
        links: Sequence[ExecutorLink],
        *,
        pacer: Pacer,
        reports: DeliveryReports,
        limits: DispatchLimits,
        clock: Clock,
    ) -> None:
        self._links = {link.address: link for link in links}
        self._pacer = pacer
        self._reports = reports
        self._limits = limits
        self._clock = clock
        self.tracing: Tracing = NO_TRACING  # makes the spans of requests
        self._live: dict[RequestId, Generation] = {}
        self._routes: dict[RequestId, _Route] = {}  # of live requests that an executor took
        self._traces: dict[RequestId, RequestTrace] = {}  # of live requests
        self._quotas = Quotas()
        self._generations = RoutingGenerations(clocks.wall_s)
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_ready(self) -> bool:
        """Say whether a request would be taken now: an executor is connected, no drain runs."""
        return not self._is_draining and bool(self.models())

    def models(self) -> list[ModelInfo]:
        """Return one entry per model, sorted, with the largest context that is served."""
        largest: dict[str, ModelInfo] = {}
        for link in self._links.values():
            info = link.info
            if info is None:
                continue
            known = largest.get(info.model)
            if known is None or info.max_model_len > known.max_model_len:
                largest[info.model] = info
        return [largest[model] for model in sorted(largest)]

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Like `generate_all`, for one request."""
        async with self.generate_all([request]) as (generation,):
            yield generation

    @asynccontextmanager
    async def generate_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[Sequence[Generation]]:
        """Have executors take all of `requests`, of one model, or none; on leaving, whatever is not
        finished is aborted.

        Raises on entry, before anything reaches a client: OverloadedError above the limit of live
        requests, DuplicateRequestError, UnknownModelError, UnavailableError without an executor,
        DeadlineError without an answer in time, and what an executor refuses one of them for.
        """
        generations = self._admit(requests)
        try:
            await side_by_side([self._place(generation) for generation in generations])
            yield generations
        finally:
            for generation in generations:
                self.drop(generation)

    def drop(self, generation: Generation) -> None:
        """Have nothing more to do with a request: abort it unless it is finished. Idempotent."""
        request_id = generation.request.request_id
        if self._live.get(request_id) is not generation:
            return
        del self._live[request_id]
        generation.close()
        route = self._routes.pop(request_id, None)
        if route is not None:
            route.link.abandon(request_id)
            self._reports.update(route.ref, final=True)
        self._quotas.leave(generation.caller, generation.num_tokens)
        metrics.LIVE_REQUESTS.dec()
        metrics.REQUESTS.labels(generation.result).inc()
        trace = self._traces.pop(request_id)
        trace.end(generation.result, generation.finish, generation.ttft_s)
        if not self._live:
            self._idle.set()

    def cancel(self, request_id: RequestId) -> None:
        """End a live request of the same caller, all its answers, as cancelled.

        Raises UnknownRequestError if there is none.
        """
        named = [
            generation
            for generation in self._live.values()
            if request_id in generation.request.ids and generation.caller == current_caller()
        ]
        if not named:
            raise UnknownRequestError(f'no live request has the id "{request_id}"')
        for generation in named:
            generation.cancel()
            for link in self._links.values():
                link.abort(generation.request.request_id)

    async def watch_readers(self) -> None:
        """End requests whose readers take nothing, until cancelled; one loop for all of them."""
        timeout_s = self._limits.reader_timeout_s
        while True:
            await asyncio.sleep(min(timeout_s / 4, MAX_WATCH_INTERVAL_S))
            now_s = self._clock()
            for generation in list(self._live.values()):
                if generation.reader_stopped_for_s(now_s) >= timeout_s:
                    log.info("reader_stopped", request_id=generation.request.request_id)
                    generation.give_up(ReaderStoppedError("the reader has stopped reading"))
                    self.drop(generation)

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """End every live request with an error; tokens that are here go out first."""
        for generation in list(self._live.values()):
            generation.failed(UnavailableError(DRAINING_MESSAGE))

    def _admit(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Make all of `requests` live, or raise why not."""
        if self._is_draining:
            raise UnavailableError(DRAINING_MESSAGE)
        limit, num_free = (
            self._limits.max_live_requests,
            self._limits.max_live_requests - self.num_live,
        )
        if len(requests) > limit:
            raise InvalidRequestError(f"n: at most {limit} answers can be asked for", field="n")
        if len(requests) > num_free:
            raise TooManyRequestsError(limit=limit, num_free=num_free)
        self._check_context(requests)
        for request in requests:
            if request.request_id in self._live:
                raise DuplicateRequestError(request.request_id)
        self._quotas.enter(current_caller(), len(requests))
        return [self._enter(request) for request in requests]

    def _check_context(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise ContextLengthError for a request that no executor of its model has room for."""
        lengths = {info.model: info.max_model_len for info in self.models()}
        for request in requests:
            if request.model in lengths:
                check_context(request, lengths[request.model])

    def _enter(self, request: GenerationRequest) -> Generation:
        generation = Generation(
            request,
            pacer=self._pacer,
            clock=self._clock,
            arrived_s=self._clock(),
            max_undelivered_tokens=self._limits.max_undelivered_tokens,
        )
        self._live[request.request_id] = generation
        self._traces[request.request_id] = RequestTrace(request, self.tracing)
        self._idle.clear()
        metrics.LIVE_REQUESTS.inc()
        return generation

    async def _place(self, generation: Generation) -> None:
        """Find an executor that takes the request; one that is unavailable or full leads to the
        next, and the last one's refusal counts.
        """
        request = generation.request
        tried: set[str] = set()
        refusal: ServiceError | None = None
        while True:
            try:
                chosen = self._choose(request.model, tried)
            except (UnavailableError, UnknownModelError) as error:
                raise refusal or error from None
            tried.add(chosen.address)
            try:
                await self._submit(self._links[chosen.address], generation)
            except (UnavailableError, OverloadedError) as error:
                if self._is_draining:
                    raise
                refusal = error
                log.info("request_rerouted", address=chosen.address)
                generation.reset()
            else:
                return

    def _choose(self, model: str, tried: set[str]) -> Candidate:
        candidates = [c for link in self._links.values() if (c := link.candidate())]
        return choose_executor(candidates, model, excluded=tried)

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Return a prompt's tokens, from any executor of the model. Raises what `generate_all`
        does for the model, and InvalidRequestError if the prompt cannot be rendered.
        """
        return await self._links[self._choose(model, set()).address].tokenize(prompt, options)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises as `tokenize` does."""
        return await self._links[self._choose(model, set()).address].detokenize(ids)

    async def _submit(self, link: ExecutorLink, generation: Generation) -> None:
        """Submit to `link` and wait for its answer; record the route if it takes the request."""
        request, info = generation.request, link.info
        number = self._generations.next(request.request_id)
        trace = self._traces[request.request_id].context
        link.submit(request, number, generation, trace=trace)
        assert info is not None
        try:
            async with asyncio.timeout(rpc.timeout_s(self._limits.submit_timeout_s)):
                await generation.answered()
        except BaseException as error:
            link.abandon(request.request_id)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the executor did not answer in time") from None
            raise
        ref = RequestRef(info.executor_id, request.request_id, number)
        self._routes[request.request_id] = _Route(link, ref)
        generation.listen(self)
        self._reports.register(
            convert.registration_to_proto(
                request,
                executor_id=info.executor_id,
                generation=number,
                num_prompt_tokens=generation.num_prompt_tokens,
            )
        )

    def progressed(self, request_id: RequestId, num_delivered: int) -> None:
        """Tell executor and tracker how far a reader has come."""
        route = self._routes.get(request_id)
        if route is not None:
            route.link.delivered(request_id, num_delivered)
            self._reports.update(route.ref, num_delivered=num_delivered)

    def lags(self, request_id: RequestId, hold: bool) -> None:
        """Have the executor hold a request whose reader lags, or go on with it."""
        route = self._routes.get(request_id)
        if route is not None and route.link.hold(request_id, hold) and hold:
            metrics.HOLDS.inc()
