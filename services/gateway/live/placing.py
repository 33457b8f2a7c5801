"""Which executor takes a live request, and what both then say to each other."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.gateway import convert, metrics
from services.gateway.checks import fits_context
from services.gateway.errors import (
    ContextLengthError,
    FormsBusyError,
    LinkBrokenError,
    UnknownModelError,
)
from services.gateway.executors.affinity import conversation_of
from services.gateway.executors.link import Asked, ExecutorLink
from services.gateway.executors.routing import Candidate, choose_executor
from services.gateway.live.generation import Generation
from services.gateway.live.reports import DeliveryReports
from services.gateway.live.request_trace import RequestTrace
from services.gateway.types import GenerationRequest, RequestId, ServedModel
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.kit import rpc
from services.kit.errors import DeadlineError, OverloadedError, ServiceError, UnavailableError
from services.reporting.ledger import RequestRef

log = structlog.get_logger()

MAX_LOST_EXECUTORS = 2  # over one request that none of them had answered


@dataclass(frozen=True, slots=True)
class Route:
    """Where a live request is, and who hears there how its reader comes along."""

    link: ExecutorLink
    ref: RequestRef
    reports: DeliveryReports

    def progressed(self, num_delivered: int) -> None:
        """Tell executor and tracker how far the reader has come."""
        self.link.delivered(self.ref.request_id, num_delivered)
        self.reports.update(self.ref, num_delivered=num_delivered)

    def lags(self, hold: bool) -> None:
        """Have the executor hold the request, for its reader lags, or go on with it."""
        if self.link.hold(self.ref.request_id, hold) and hold:
            metrics.HOLDS.inc()

    def leave(self) -> None:
        """Have executor and tracker know that nobody wants more of the request."""
        self.link.abandon(self.ref.request_id)
        self.reports.update(self.ref, final=True)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """All that the gateway has of one request, from its admission to its end."""

    generation: Generation
    names: tuple[RequestId | None, ...]  # what its client may call it; others' may be the same
    trace: RequestTrace
    num_submits: int = 0  # also the number of its last routing
    route: Route | None = None  # once an executor has taken it


class Placing:
    """Finds executors for requests, and follows them there."""

    def __init__(
        self,
        links: Sequence[ExecutorLink],
        reports: DeliveryReports,
        *,
        submit_timeout_s: float,
    ) -> None:
        """`submit_timeout_s`: for an executor to accept or reject, > 0."""
        self._links = {link.address: link for link in links}
        self._reports = reports
        self._submit_timeout_s = submit_timeout_s
        self._turns = itertools.count()

    def models(self) -> list[ServedModel]:
        """Return one entry per model, with the largest context that is served: sorted, adapters
        after what they adapt.
        """
        largest: dict[str, ServedModel] = {}
        infos = [link.info for link in self._links.values() if link.info is not None]
        for served in itertools.chain.from_iterable(info.each() for info in infos):
            known = largest.get(served.model)
            if known is None or served.max_model_len > known.max_model_len:
                largest[served.model] = served
        return sorted(largest.values(), key=lambda one: (one.parent is not None, one.model))

    async def place(
        self, answers: Sequence[LiveRequest], *, is_draining: Callable[[], bool]
    ) -> None:
        """Find an executor that takes all answers to a prompt and has a context for it; one that is
        unavailable, full or silent leads to the next, one whose context is too short to a longer
        one. The last one's refusal counts. A request goes to no other executor when its form was
        not compiled in time, and to no third when two were lost: it may be what they were lost to.
        """
        request = answers[0].generation.request
        model, conversation = request.model, conversation_of(request)
        tried = self._too_short(request)
        refusal: ServiceError | None = None
        num_lost = 0
        while True:
            try:
                chosen = self._choose(model, tried, conversation)
            except (UnavailableError, UnknownModelError) as error:
                raise refusal or error from None
            tried.add(chosen.address)
            try:
                await self._submit(self._links[chosen.address], answers)
            except FormsBusyError:
                raise  # all others would have the same form to compile
            except (UnavailableError, OverloadedError, DeadlineError, ContextLengthError) as error:
                num_lost += isinstance(error, LinkBrokenError)
                is_late = not rpc.timeout_s(self._submit_timeout_s)
                if is_draining() or is_late or num_lost >= MAX_LOST_EXECUTORS:
                    raise
                refusal = error
                if isinstance(error, ContextLengthError):
                    tried |= {
                        candidate.address
                        for candidate in self._candidates()
                        if candidate.max_model_len <= chosen.max_model_len
                    }
                log.info("request_rerouted", address=chosen.address)
                for live in answers:
                    live.generation.reset()
            else:
                return

    def _too_short(self, request: GenerationRequest) -> set[str]:
        """Return the executors whose context a request does not fit; the longest ones are tried
        all the same, and cut its answer to what they have.
        """
        able = [c for c in self._candidates() if request.model in c.models]
        longest = max((c.max_model_len for c in able), default=0)
        return {
            c.address
            for c in able
            if c.max_model_len < longest and not fits_context(request, c.max_model_len)
        }

    def _choose(self, model: str, tried: set[str], conversation: bytes = b"") -> Candidate:
        turn = next(self._turns)
        return choose_executor(
            self._candidates(), model, excluded=tried, turn=turn, conversation=conversation
        )

    def _candidates(self) -> list[Candidate]:
        return [c for link in self._links.values() if (c := link.candidate())]

    async def _submit(self, link: ExecutorLink, answers: Sequence[LiveRequest]) -> None:
        """Submit to `link` and wait until it has taken all; record the route if it does."""
        info = link.info
        number = answers[0].num_submits + 1
        for live in answers:
            live.num_submits = number
        asked = [
            Asked(live.generation.request, live.generation, live.trace.context) for live in answers
        ]
        link.submit(asked, number)
        assert info is not None
        try:
            async with asyncio.timeout(rpc.timeout_s(self._submit_timeout_s)):
                for live in answers:
                    await live.generation.answered()
        except BaseException as error:
            for live in answers:
                link.abandon(live.generation.request.request_id)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the executor did not answer in time") from None
            raise
        for live in answers:
            self._taken(live, link, info.executor_id)

    def _taken(self, live: LiveRequest, link: ExecutorLink, executor_id: str) -> None:
        """Record where a request is."""
        generation, number = live.generation, live.num_submits
        if not generation.num_prompt_tokens:
            return  # cancelled before anything of it was done: it has ended already
        ref = RequestRef(executor_id, generation.request.request_id, number)
        live.route = Route(link, ref, self._reports)
        self._reports.register(
            convert.registration_to_proto(
                generation.request,
                executor_id=executor_id,
                generation=number,
                num_prompt_tokens=generation.num_prompt_tokens,
            )
        )

    def abort(self, request_id: RequestId) -> None:
        """Have whoever has a request end it."""
        for link in self._links.values():
            link.abort(request_id)

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Return a prompt's tokens, from any executor of the model. Raises UnknownModelError,
        UnavailableError, and InvalidRequestError if the prompt cannot be rendered.
        """
        return await self._links[self._choose(model, set()).address].tokenize(prompt, options)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises as `tokenize` does."""
        return await self._links[self._choose(model, set()).address].detokenize(ids)
