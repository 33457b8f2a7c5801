"""A compiler of grammars that clients share fairly."""

import asyncio
import json
from asyncio import Future
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from services.executor.prompts.grammar_compiler import DEADLY, TOO_COMPLEX, NoVerdictError
from services.kit.clock import Clock
from services.kit.fair_turns import FairTurns

MAX_FORMS = 128  # that wait for one client
MAX_REMEMBERED = 4_096
DOUBTFUL = (TOO_COMPLEX, DEADLY)  # it may have been the machine
DOUBT_S = 600.0  # so long such a verdict is remembered


class Compiler(Protocol):
    """What compiles one grammar at a time: a `GrammarCompiler`."""

    async def fault(self, kind: str, text: str, ids: Sequence[int] = (), *, cpu_s: float) -> str:
        """Return what is wrong with a grammar, or ""; NoVerdictError if that is not found out."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


class Form(NamedTuple):
    """A grammar, and the tokens of an answer that has begun."""

    kind: str  # vLLM's name: json_object, json, regex, grammar or structural_tag
    text: str
    ids: tuple[int, ...] = ()

    def digest(self) -> bytes:
        """Return what stands for the form where it is remembered."""
        return sha256(json.dumps(self).encode()).digest()


class GrammarLane:
    """Compiles each new form once, for all that ask for it. Clients take turns."""

    def __init__(self, compiler: Compiler, *, cpu_s: float, clock: Clock) -> None:
        """A form may take `cpu_s` > 0 seconds of a processor."""
        self._compiler = compiler
        self._cpu_s = cpu_s
        self._clock = clock
        self._turns = FairTurns()
        self._asked = WeakValueDictionary[bytes, Future[str]]()  # by digest; while it is awaited
        self._waiting: dict[str, Counter[bytes]] = {}  # digests of what each client waits for
        self._faults: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # and until when

    async def fault(self, form: Form, *, fair_key: str) -> str:
        """Return what is wrong with a form, once a turn of any client that asks for it has come.

        Raises NoVerdictError. A form that no client waits for any more is not begun; one that has
        begun is compiled to its end.
        """
        digest = form.digest()
        fault, until_s = self._faults.get(digest, ("", 0.0))
        if until_s > self._clock():
            return fault
        verdict = self._asked.get(digest) or asyncio.get_running_loop().create_future()
        self._asked[digest] = verdict
        work = partial(self._compile, form, digest, verdict)
        with self._counted(digest, fair_key):
            turn = asyncio.create_task(self._turns.run(work, key=fair_key, size=len(form.text)))
            try:
                return await asyncio.shield(verdict)
            finally:
                turn.cancel()

    @contextmanager
    def _counted(self, digest: bytes, fair_key: str) -> Iterator[None]:
        """Count a form among its client's. Raises NoVerdictError if those are too many: their
        requests would take the places of all others.
        """
        forms = self._waiting.setdefault(fair_key, Counter())
        if digest not in forms and len(forms) >= MAX_FORMS:
            raise NoVerdictError("too many forms of one client wait")
        forms[digest] += 1
        try:
            yield
        finally:
            forms[digest] -= 1
            if not forms[digest]:
                del forms[digest]
            if not forms:
                del self._waiting[fair_key]

    async def _compile(self, form: Form, digest: bytes, verdict: Future[str]) -> None:
        if verdict.done():
            return
        try:
            fault = await self._compiler.fault(*form, cpu_s=self._cpu_s)
        except Exception as error:  # noqa: BLE001 - it is told to all that ask
            verdict.set_exception(error)
            verdict.exception()  # it may be that no client waits any more
        else:
            self._remember(digest, fault)
            verdict.set_result(fault)
        finally:
            verdict.cancel()  # if this was
            self._asked.pop(digest, None)

    def _remember(self, digest: bytes, fault: str) -> None:
        lasts_s = DOUBT_S if fault in DOUBTFUL else float("inf")
        self._faults[digest] = (fault, self._clock() + lasts_s)
        self._faults.move_to_end(digest)
        if len(self._faults) > MAX_REMEMBERED:
            self._faults.popitem(last=False)

    async def close(self) -> None:
        """Break off what is compiled, and end the compiler. Nothing may be asked any more."""
        await self._turns.close()
        await self._compiler.close()
