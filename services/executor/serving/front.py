"""The engine as gateways see it: its sessions, and whether it takes requests at all."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Protocol

import structlog

from services.executor.kv_holders import KVHolders
from services.executor.metrics import DEPOSITED_TOKENS, LIVE_REQUESTS, STREAMS
from services.executor.observation import EngineObservation
from services.executor.serving.kv_account import KVAccount, account_of
from services.executor.serving.load import Newcomers, load_of
from services.executor.serving.next_prefixes import NextPrefixes
from services.executor.serving.progress import NoProgress, ProgressSink
from services.executor.serving.session import Admission, Gateway, GenerationEngine, Session
from services.executor.serving.step_stream import BEAT_S
from services.executor.serving.tool_waits import ToolWaits
from services.executor.serving.watch import watch
from services.executor.types import (
    EngineLoad,
    ModelInfo,
    RejectCode,
    RejectedError,
    Rejection,
    Submission,
)
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.kit import clock
from services.kit.errors import InvalidRequestError, NotFoundError, UnavailableError
from services.kit.telemetry.tracing import NO_TRACING, Tracing
from services.reporting.load import ExecutorLoad

log = structlog.get_logger()

RESUMED_SHARE = 4  # a part of the limit, beside it: for answers that were begun elsewhere


class ServedEngine(GenerationEngine, Protocol):
    """What the front needs of an engine; see `services.executor.engine.engine.Engine`."""

    def load(self) -> EngineLoad: ...
    async def detokenize(self, ids: Sequence[int], *, fair_key: str) -> str: ...
    async def release_session(self, account: str, session_id: str) -> int: ...
    async def observe(self) -> EngineObservation: ...
    async def kv_holders(self, max_sessions: int) -> KVHolders: ...
    def model_info(self, model_id: str) -> ModelInfo: ...


class FrontState(Enum):
    """Why the front takes requests or does not; the value is told to clients."""

    LOADING = "the engine is loading"
    SERVING = "serving"
    DRAINING = "the executor is shutting down"
    DEAD = "the engine has died"


class Front:
    """Opens sessions on the engine once it is loaded, and ends them all when it goes."""

    def __init__(
        self,
        *,
        model_id: str,
        adapter_ids: Collection[str] = (),
        max_num_reqs: int,
        progress: ProgressSink | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """Refuse requests beyond `max_num_reqs` live ones, over all gateways, and for other models
        than that and its adapters.
        """
        self.model_id = model_id
        self._served = {model_id, *adapter_ids}
        self._max_num_reqs = max_num_reqs
        self._progress = progress or NoProgress()
        self._tracing = tracing
        self._engine: ServedEngine | None = None
        self._state = FrontState.LOADING
        self._sessions: set[Session] = set()
        self._newcomers = Newcomers(clock.monotonic_s)
        self._request_ended = asyncio.Event()
        self._next_prefixes = NextPrefixes(self._is_idle)
        self._admission = Admission(
            self._why_not,
            self._request_ended.set,
            self._newcomers,
            ToolWaits(clock.monotonic_s),
            self._next_prefixes,
        )
        self._over = asyncio.Event()  # nothing will be generated any more
        LIVE_REQUESTS.set_function(lambda: self.num_live)
        DEPOSITED_TOKENS.set_function(lambda: self.num_deposited)

    @property
    def num_live(self) -> int:
        return sum(session.num_live for session in list(self._sessions))

    @property
    def num_deposited(self) -> int:
        return sum(session.num_deposited for session in list(self._sessions))

    def _is_idle(self) -> bool:
        """Return whether no request waits: for its first token, or for its turn; False where a
        prefix that is computed would be found by none.
        """
        if self._state is not FrontState.SERVING or self._newcomers.num_reqs:
            return False
        caches = self.engine.model_info(self.model_id).caches_prefixes
        return caches and not self.load().num_waiting_reqs

    def serve(self, engine: ServedEngine) -> None:
        """Take requests from now on."""
        self._engine, self._state = engine, FrontState.SERVING

    @property
    def engine(self) -> ServedEngine:
        """Return the loaded engine; UnavailableError while it loads and after it died."""
        if self._engine is None or self._state is FrontState.DEAD:
            raise UnavailableError(self._state.value)
        return self._engine

    def load(self) -> EngineLoad:
        """Return the engine's load; UnavailableError as for `engine`."""
        return self.engine.load()

    async def tokenize(
        self, model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Return a prompt's tokens. NotFoundError for another model, InvalidRequestError naming
        the field at fault, UnavailableError as for `engine`.
        """
        self._check_model(model)
        with _rejections_raised():
            return await self.engine.tokenize(prompt, options)

    async def detokenize(self, model: str, ids: Sequence[int], *, fair_key: str) -> str:
        """Return the text of tokens. Raises as `tokenize` does."""
        self._check_model(model)
        with _rejections_raised():
            return await self.engine.detokenize(ids, fair_key=fair_key)

    async def release_session(self, account: str, session_id: str) -> int:
        """Keep nothing for a session any more; return how many tokens were. UnavailableError as for
        `engine`.
        """
        return await self.engine.release_session(account, session_id)

    async def kv_account(self, limit: int) -> KVAccount:
        """Return what holds KV, at most `limit` entries of a kind. UnavailableError as for
        `engine`.
        """
        holders = await self.engine.kv_holders(limit)
        live = (one for session in self._sessions for one in session.live)
        submissions = {one.engine_id: one.submission for one in live if one.engine_id}
        return account_of(holders, submissions, limit=limit)

    def _check_model(self, model: str) -> None:
        if model not in self._served:
            raise NotFoundError(self._no_such_model(model))

    async def observations(self, interval_s: float) -> AsyncIterator[EngineObservation]:
        """Yield what the scheduler sees, with the clients' ids, at most every `interval_s`.

        Ends with the last session of a drain; UnavailableError as for `engine`.
        """
        async for observation in watch(self.engine.observe, interval_s=interval_s, over=self._over):
            yield self._named(observation)

    def _named(self, observation: EngineObservation) -> EngineObservation:
        """Put the clients' ids in place of the engine's; requests no client has are left out."""
        names = self._request_ids()
        requests = tuple(
            replace(request, request_id=names[request.request_id])
            for request in observation.requests
            if request.request_id in names
        )
        prefixes = tuple(
            replace(prefix, request_ids=tuple(names[i] for i in prefix.request_ids if i in names))
            for prefix in observation.prefixes
        )
        return replace(observation, requests=requests, prefixes=prefixes)

    def _request_ids(self) -> dict[str, str]:
        """Return the ids of requests that the engine has: the clients' by the engine's."""
        names: dict[str, str] = {}
        for session in self._sessions:
            names |= session.request_ids
        return names

    def held(self) -> frozenset[str]:
        """Return the engine's ids of the requests that output is awaited of."""
        return frozenset(self._request_ids()) | self._next_prefixes.engine_ids

    def lose(self, engine_ids: Collection[str]) -> None:
        """End requests that the engine does not have any more with a retryable failure."""
        self._next_prefixes.lose(engine_ids)
        for session in list(self._sessions):
            session.lose(engine_ids)

    def open_session(self, gateway_id: str, *, epoch: int = 0) -> Session:
        """Return a session, to be closed by `close_session`; UnavailableError unless serving.

        `epoch` > 0: sessions of the same gateway with a smaller one are closed first, as their
        links are broken or about to be; UnavailableError if there is one with a greater.
        """
        engine = self.engine
        if self._state is not FrontState.SERVING:
            raise UnavailableError(self._state.value)
        if epoch:
            self._supersede(gateway_id, epoch)
        session = Session(
            engine,
            gateway=Gateway(gateway_id, epoch),
            progress=self._progress,
            admission=self._admission,
            tracing=self._tracing,
        )
        self._sessions.add(session)
        STREAMS.set(len(self._sessions))
        log.info("gateway_connected", gateway_id=gateway_id)
        return session

    def _supersede(self, gateway_id: str, epoch: int) -> None:
        """Close a gateway's sessions that came before the one of this epoch."""
        known = [
            one for one in self._sessions if one.gateway.id == gateway_id and one.gateway.epoch
        ]
        if any(one.gateway.epoch > epoch for one in known):
            raise UnavailableError("a newer stream of this gateway is open")
        for session in known:
            self.close_session(session)

    def close_session(self, session: Session) -> None:
        """Abort what the session left in the engine, and forget it; once more changes nothing."""
        if session not in self._sessions:
            return
        num_aborted = session.num_live
        session.close()
        self._sessions.discard(session)
        STREAMS.set(len(self._sessions))
        log.info("gateway_left", gateway_id=session.gateway.id, num_aborted_reqs=num_aborted)

    async def beat(self) -> None:
        """Tell gateways the load, and those that have requests here that the engine steps, four
        times a second until cancelled, or until the engine has died.
        """
        while self._state is not FrontState.DEAD:
            try:
                load = self.load_for_gateways()
                for session in list(self._sessions):
                    session.beat(load)
            except Exception:  # without beats the executor would be taken for dead
                log.exception("beat_crashed")
            await asyncio.sleep(BEAT_S)

    def load_for_gateways(self) -> ExecutorLoad:
        """Return what all gateways ask of the engine; UnavailableError as for `engine`."""
        live = [one for session in self._sessions for one in session.live]
        return load_of(self.engine.load(), self._newcomers, live)

    def _why_not(self, submissions: Sequence[Submission]) -> Rejection | None:
        if self._state is not FrontState.SERVING:
            return Rejection(code=RejectCode.UNAVAILABLE, message=self._state.value)
        model = submissions[0].model
        if model not in self._served:
            message = self._no_such_model(model)
            return Rejection(code=RejectCode.UNKNOWN_MODEL, field="model", message=message)
        most = self._max_num_reqs
        resume = submissions[0].resume
        if resume is not None and not resume.num_retold_tokens:
            most += most // RESUMED_SHARE
        if self.num_live + len(submissions) > most:
            message = f"{most} requests are live; try again later"
            return Rejection(code=RejectCode.OVERLOADED, message=message)
        return None

    def _no_such_model(self, model: str) -> str:
        return f"the model {model!r} does not exist here"

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, tell gateways so, let live ones end here or go on elsewhere, fail
        the rest after `timeout_s`, end streams.
        """
        self._state = FrontState.DRAINING
        for session in self._sessions:
            session.leave()
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_live:
                    self._request_ended.clear()
                    await self._request_ended.wait()
        except TimeoutError:
            log.warning("drain_timed_out", num_live_reqs=self.num_live)
        self._end_sessions()

    def die(self) -> None:
        """Fail all requests and end all streams: the engine is gone."""
        self._state = FrontState.DEAD
        self._end_sessions()

    def _end_sessions(self) -> None:
        self._over.set()
        self._next_prefixes.stop()
        for session in self._sessions:
            session.fail_all(self._state.value)
            session.end(UnavailableError(self._state.value))


@contextmanager
def _rejections_raised() -> Iterator[None]:
    """Raise what the engine rejects as InvalidRequestError, or UnavailableError if it is dead."""
    try:
        yield
    except RejectedError as error:
        rejection = error.rejection
        if rejection.code is RejectCode.UNAVAILABLE:
            raise UnavailableError(rejection.message) from error
        raise InvalidRequestError(rejection.message, field=rejection.field) from error
