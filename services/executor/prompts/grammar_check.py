"""Says whether the engine will be able to hold an answer to a form, before the engine sees it.

vLLM parses a grammar when it checks a request and compiles it in the engine, where a fault fails
the request late and a compilation without end keeps all other grammars waiting.
"""

import asyncio
from collections.abc import Callable, Sequence

from services.executor.prompts.grammar_compiler import TOO_COMPLEX, NoVerdictError
from services.executor.prompts.grammar_lane import Compiler, Form, GrammarLane
from services.kit.clock import Clock, monotonic_s

QUICK_CPU_S = 0.1  # ordinary forms take a hundredth of a second


class GrammarError(ValueError):
    """An answer cannot be held to the form that was asked for."""


class GrammarsBusyError(Exception):
    """It was not found out in time whether an answer can be held to its form."""


class GrammarCheck:
    """Compiles forms in two lanes, with a process each: all of them in the first one for a short
    time, and in the second one for as long as they may take those that this was not enough for.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        cpu_s: float,
        max_wait_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """A form may take `cpu_s` > 0 seconds of a processor, and each request waits at most
        `max_wait_s` >= 0 seconds for its form.
        """
        quick_s = min(QUICK_CPU_S, cpu_s)
        self._quick = GrammarLane(make_compiler(), cpu_s=quick_s, clock=clock)
        self._slow = GrammarLane(make_compiler(), cpu_s=cpu_s, clock=clock)
        self._max_wait_s = max_wait_s

    async def check(
        self, kind: str, text: str, ids: Sequence[int] = (), *, fair_key: str = ""
    ) -> None:
        """Raise GrammarError if the engine could not use the grammar, or it does not allow `ids`,
        the tokens that an answer has already; GrammarsBusyError if it was not found out in time.
        `kind` is vLLM's name: json_object, json, regex, grammar or structural_tag.
        """
        form = Form(kind, text, tuple(ids))
        try:
            async with asyncio.timeout(self._max_wait_s):
                fault = await self._fault(form, fair_key)
        except (TimeoutError, NoVerdictError):
            message = "the form could not be compiled in time; try again later"
            raise GrammarsBusyError(message) from None
        if fault:
            raise GrammarError(fault)

    async def _fault(self, form: Form, fair_key: str) -> str:
        fault = await self._quick.fault(form, fair_key=fair_key)
        if fault != TOO_COMPLEX:
            return fault
        return await self._slow.fault(form, fair_key=fair_key)

    async def close(self) -> None:
        """End the processes."""
        await self._quick.close()
        await self._slow.close()
