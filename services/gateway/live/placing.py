"""Which executor takes a live request."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from services.gateway.checks import fits_context
from services.gateway.errors import (
    CannotResumeError,
    ContextLengthError,
    FormsBusyError,
    LinkBrokenError,
    UnknownModelError,
)
from services.gateway.executors.affinity import conversation_of
from services.gateway.executors.routing import Candidate, Wanted, choose_executor
from services.gateway.live.failover.moves import Moves
from services.gateway.live.route import LiveRequest, Routes
from services.gateway.types import (
    GenerationRequest,
    RequestId,
    ServedModel,
    estimated_num_tokens,
)
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.kit import rpc
from services.kit.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from services.pacing.deposit import release_interval_s

log = structlog.get_logger()

_OUTPUT_IDS = "resume.output_ids"  # what executors call the tokens that an answer has


class Placing:
    """Finds executors for requests, and follows them there."""

    def __init__(
        self, routes: Routes, moves: Moves, *, submit_timeout_s: float, rng: random.Random
    ) -> None:
        """`submit_timeout_s`: for an executor to accept or reject, > 0."""
        self._routes = routes
        self._links = routes.links
        self._moves = moves
        self._submit_timeout_s = submit_timeout_s
        self._rng = rng
        self._turns = itertools.count()

    @property
    def is_possible(self) -> bool:
        """Say whether an executor takes requests."""
        return bool(self._candidates())

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
        not compiled in time. `Moves` has those that are lost with their executor.
        """
        request = answers[0].generation.request
        wanted, tried = _wanted(request), set[str]()
        refusal: ServiceError | None = None
        while True:
            try:
                chosen = self._choose(replace(wanted, excluded=tried))
            except (UnavailableError, UnknownModelError) as error:
                raise refusal or error from None
            tried.add(chosen.address)
            try:
                await self._submit(chosen.address, answers)
            except FormsBusyError:
                raise  # all others would have the same form to compile
            except LinkBrokenError as error:
                await self._elsewhere(answers, error)
                return
            except (UnavailableError, OverloadedError, DeadlineError, ContextLengthError) as error:
                if is_draining() or not rpc.timeout_s(self._submit_timeout_s):
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

    def _choose(self, wanted: Wanted) -> Candidate:
        wanted = replace(wanted, turn=next(self._turns))
        return choose_executor(self._candidates(), wanted, self._rng)

    def _candidates(self) -> list[Candidate]:
        return self._routes.candidates()

    async def _submit(self, address: str, answers: Sequence[LiveRequest]) -> None:
        """Submit to an executor and wait until it has taken all."""
        self._routes.submit(address, answers, self._moves)
        try:
            async with asyncio.timeout(rpc.timeout_s(self._submit_timeout_s)):
                for live in answers:
                    await live.generation.answered()
        except BaseException as error:
            for live in answers:
                if live.home is None and live.route is not None:
                    live.route.link.abandon(live.generation.request.request_id)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the executor did not answer in time") from None
            if isinstance(error, CannotResumeError | InvalidRequestError):
                raise _named(error, answers[0].generation.request) from None
            raise

    async def _elsewhere(self, answers: Sequence[LiveRequest], error: ServiceError) -> None:
        """Wait until all answers have been taken that were lost before; those that had been move
        already. Raises what ends one of them.
        """
        for live in answers:
            if live.home is None:
                live.generation.reset()
                if (final := self._moves.take(live, error)) is not None:
                    raise final
        for live in answers:
            await live.generation.answered()

    def abort(self, request_id: RequestId) -> None:
        """Have whoever has a request end it."""
        for link in self._links.values():
            link.abort(request_id)

    async def release_session(self, account: str, session_id: str) -> int:
        """Have every executor keep nothing for an account's session; return how many tokens they
        kept. Raises what one of them failed with, unless others kept something.
        """
        calls = [link.release_session(account, session_id) for link in self._links.values()]
        released = await asyncio.gather(*calls, return_exceptions=True)
        num_tokens = sum(one for one in released if isinstance(one, int))
        for fault in released:
            is_of_service = isinstance(fault, ServiceError)
            if isinstance(fault, BaseException) and not (is_of_service and num_tokens):
                raise fault
        return num_tokens

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Return a prompt's tokens, from any executor of the model. Raises UnknownModelError,
        UnavailableError, and InvalidRequestError if the prompt cannot be rendered.
        """
        return await self._links[self._choose(Wanted(model=model)).address].tokenize(
            prompt, options
        )

    async def detokenize(self, model: str, ids: Sequence[int], *, fair_key: str) -> str:
        """Return the text of tokens. Raises as `tokenize` does."""
        link = self._links[self._choose(Wanted(model=model)).address]
        return await link.detokenize(ids, fair_key=fair_key)


def _wanted(request: GenerationRequest) -> Wanted:
    num_tokens = estimated_num_tokens(request.prompt)

    def fits(max_model_len: int) -> bool:
        return num_tokens < max_model_len and fits_context(request, max_model_len)

    level = request.service_level
    return Wanted(
        model=request.model,
        num_prompt_tokens=num_tokens,
        fits=fits,
        conversation=conversation_of(request),
        slo_ttft_s=level.slo_ttft_s,
        is_paced=release_interval_s(level) > 0,
    )


def _named(error: ServiceError, request: GenerationRequest) -> ServiceError:
    """Return a refusal with the names that the client knows: of an answer that the client has a
    beginning of, the ids are at fault if it cannot go on.
    """
    begun, field = request.begun, getattr(error, "field", "")
    if begun is None or not (isinstance(error, CannotResumeError) or field == _OUTPUT_IDS):
        return error
    name = f"{begun.name}.token_ids"
    return InvalidRequestError(f"{name}: {str(error).removeprefix(f'{_OUTPUT_IDS}: ')}", field=name)
