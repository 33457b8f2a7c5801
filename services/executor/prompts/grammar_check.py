"""Says whether the engine will be able to hold an answer to a form, before the engine sees it.

vLLM parses a grammar when it checks a request and compiles it in the engine, where a fault fails
the request late and a compilation without end keeps all other grammars waiting.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from weakref import WeakValueDictionary

from services.executor.prompts.grammar_compiler import TOO_COMPLEX, GrammarCompiler
from services.kit.clock import Clock, monotonic_s

NUM_COMPILERS = 2  # so that no tenant's grammars keep all others' waiting
MAX_WAIT_S = 20.0  # for the grammars of other requests
MAX_REMEMBERED = 4_096
TIMEOUT_REMEMBERED_S = 600.0  # it may have been the machine's fault


class GrammarError(ValueError):
    """An answer cannot be held to the form that was asked for."""


class GrammarsBusyError(Exception):
    """Too many grammars wait to be compiled."""


class GrammarCheck:
    """Compiles each new grammar once, in one of two processes that are started when they are first
    needed; of a tenant's grammars one at a time. It goes on when who asked has left: to break off
    costs more.
    """

    def __init__(
        self,
        describe_tokenizer: Callable[[], str],
        *,
        timeout_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """As for a `GrammarCompiler`."""
        self._compilers = [
            GrammarCompiler(describe_tokenizer, timeout_s=timeout_s) for _ in range(NUM_COMPILERS)
        ]
        self._idle = list(self._compilers)  # the last one is used first
        self._clock = clock
        self._turn = asyncio.Semaphore(NUM_COMPILERS)
        self._turns_of_tenants = WeakValueDictionary[str, asyncio.Lock]()
        self._compiling: dict[bytes, asyncio.Task[str]] = {}  # by digest, as below
        self._faults: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # and until when

    async def check(self, kind: str, text: str, *, tenant: str = "") -> None:
        """Raise GrammarError if the engine could not use the grammar, GrammarsBusyError if it was
        not found out in time. `kind` is vLLM's name: json, regex, grammar or structural_tag; an
        empty `tenant` is nobody's.
        """
        key = sha256(json.dumps([kind, text]).encode()).digest()
        fault, until_s = self._faults.get(key, ("", 0.0))
        if until_s <= self._clock():
            begun = self._compiling.get(key)
            fault = await asyncio.shield(begun or self._begin(key, kind, text, tenant))
        if fault:
            raise GrammarError(fault)

    def _begin(self, key: bytes, kind: str, text: str, tenant: str) -> asyncio.Task[str]:
        task = self._compiling[key] = asyncio.create_task(self._compiled(kind, text, tenant))
        task.add_done_callback(partial(self._remember, key))
        return task

    def _remember(self, key: bytes, task: asyncio.Task[str]) -> None:
        del self._compiling[key]
        if task.cancelled() or task.exception() is not None:
            return
        fault = task.result()
        lasts_s = TIMEOUT_REMEMBERED_S if fault == TOO_COMPLEX else float("inf")
        self._faults[key] = (fault, self._clock() + lasts_s)
        self._faults.move_to_end(key)
        if len(self._faults) > MAX_REMEMBERED:
            self._faults.popitem(last=False)

    async def _compiled(self, kind: str, text: str, tenant: str) -> str:
        # Nobody's grammars wait for one another only where both processes are busy.
        own_turn = asyncio.Lock() if not tenant else self._turn_of(tenant)
        async with AsyncExitStack() as turns:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await turns.enter_async_context(own_turn)
                    await turns.enter_async_context(self._turn)
            except TimeoutError:
                raise GrammarsBusyError("too many forms wait to be compiled") from None
            compiler = self._idle.pop()
            try:
                return await compiler.fault(kind, text)
            finally:
                self._idle.append(compiler)

    def _turn_of(self, tenant: str) -> asyncio.Lock:
        return self._turns_of_tenants.setdefault(tenant, asyncio.Lock())

    async def close(self) -> None:
        """End the processes."""
        for task in self._compiling.values():
            task.cancel()
        for compiler in self._compilers:
            await compiler.close()
