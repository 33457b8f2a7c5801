"""From a checked request to a live one: admission, routing, acceptance, progress, ending."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from services.gateway import convert, metrics
from services.gateway.api_keys import current_caller
from services.gateway.errors import (
    DuplicateRequestError,
    TooManyRequestsError,
    UnknownRequestError,
)
from services.gateway.executor_link import ExecutorLink
from services.gateway.generation import Generation
from services.gateway.pacer import Pacer
from services.gateway.quotas import Quotas
from services.gateway.reports import DeliveryReports
from services.gateway.routing import RoutingGenerations, choose_executor
from services.gateway.types import GenerationRequest, ModelInfo, RequestId
from services.kit import clock as clocks
from services.kit import rpc
from services.kit.clock import Clock
from services.kit.errors import DeadlineError, UnavailableError
from services.kit.progress_ledger import RequestRef

log = structlog.get_logger()

DRAINING_MESSAGE = "the gateway is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    max_live_requests: int  # >= 1
    submit_timeout_s: float  # for an executor to accept or reject, > 0


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
        self._live: dict[RequestId, Generation] = {}
        self._routes: dict[RequestId, _Route] = {}  # of live requests that an executor took
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
        """Have an executor take `request`; on leaving, whatever is not finished is aborted.

        Raises on entry, before anything reaches a client: OverloadedError above the limit of live
        requests, DuplicateRequestError, UnknownModelError, UnavailableError without an executor,
        DeadlineError without an answer in time, and what the executor refuses it for.
        """
        generation = self._admit(request)
        try:
            await self._place(generation)
            yield generation
        finally:
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
        if not self._live:
            self._idle.set()

    def cancel(self, request_id: RequestId) -> None:
        """End a live request of the same caller. Raises UnknownRequestError if there is none."""
        generation = self._live.get(request_id)
        if generation is None or generation.caller != current_caller():
            raise UnknownRequestError(f'no live request has the id "{request_id}"')
        generation.cancel()
        for link in self._links.values():
            link.abort(request_id)

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

    def _admit(self, request: GenerationRequest) -> Generation:
        if self._is_draining:
            raise UnavailableError(DRAINING_MESSAGE)
        if len(self._live) >= self._limits.max_live_requests:
            raise TooManyRequestsError("too many live requests; try again later")
        request_id = request.request_id
        if request_id in self._live:
            raise DuplicateRequestError(request_id)
        self._quotas.enter(current_caller())
        generation = Generation(
            request, pacer=self._pacer, clock=self._clock, arrived_s=self._clock()
        )
        self._live[request_id] = generation
        self._idle.clear()
        metrics.LIVE_REQUESTS.inc()
        return generation

    async def _place(self, generation: Generation) -> None:
        """Find an executor that takes the request; one that is unavailable leads to the next."""
        request = generation.request
        tried: set[str] = set()
        while True:
            candidates = [c for link in self._links.values() if (c := link.candidate())]
            chosen = choose_executor(candidates, request.model, excluded=tried)
            tried.add(chosen.address)
            try:
                await self._submit(self._links[chosen.address], generation)
            except UnavailableError:
                if self._is_draining or len(tried) == len(self._links):
                    raise
                log.info("request_rerouted", address=chosen.address)
                generation.reset()
            else:
                return

    async def _submit(self, link: ExecutorLink, generation: Generation) -> None:
        """Submit to `link` and wait for its answer; record the route if it takes the request."""
        request, info = generation.request, link.info
        number = self._generations.next(request.request_id)
        link.submit(request, number, generation)
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
        generation.on_progress = self._note_progress
        self._reports.register(
            convert.registration_to_proto(
                request,
                executor_id=info.executor_id,
                generation=number,
                num_prompt_tokens=generation.num_prompt_tokens,
            )
        )

    def _note_progress(self, request_id: RequestId, num_delivered: int) -> None:
        """Tell executor and tracker how far a reader has come."""
        route = self._routes.get(request_id)
        if route is not None:
            route.link.delivered(request_id, num_delivered)
            self._reports.update(route.ref, num_delivered=num_delivered)
