"""Clients take turns at two compilers; each form is compiled once, for all that ask for it."""

import asyncio
from collections.abc import Sequence

import pytest

from services.executor.prompts import grammar_lane
from services.executor.prompts.grammar_check import (
    QUICK_CPU_S,
    GrammarCheck,
    GrammarError,
    GrammarsBusyError,
)
from services.executor.prompts.grammar_compiler import DEADLY, TOO_COMPLEX, NoVerdictError
from services.executor.prompts.grammar_lane import DOUBT_S

CPU_S = 5.0
LONG_S = 600.0


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class FakeCompiler:
    """Compiles one form at a time, until it is told what to find."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.limits_s: set[float] = set()
        self.is_closed = False
        self._found: asyncio.Future[str] | None = None

    async def fault(self, kind: str, text: str, ids: Sequence[int] = (), *, cpu_s: float) -> str:
        assert self._found is None
        self.begun.append(text)
        self.limits_s.add(cpu_s)
        self._found = asyncio.get_running_loop().create_future()
        try:
            return await self._found
        finally:
            self._found = None

    async def close(self) -> None:
        self.is_closed = True

    @property
    def is_idle(self) -> bool:
        return self._found is None

    async def find(self, *faults: str | Exception) -> None:
        """End one compilation after the other with these."""
        for fault in faults:
            assert self._found is not None
            if isinstance(fault, str):
                self._found.set_result(fault)
            else:
                self._found.set_exception(fault)
            await settled()


class Bench:
    """A check whose compilers and clock are in the test's hands."""

    def __init__(self, max_wait_s: float = LONG_S) -> None:
        self.quick, self.slow = FakeCompiler(), FakeCompiler()
        self.now_s = 0.0
        compilers = iter((self.quick, self.slow))
        self.check = GrammarCheck(
            lambda: next(compilers), cpu_s=CPU_S, max_wait_s=max_wait_s, clock=lambda: self.now_s
        )

    async def ask(self, form: str, key: str = "alice") -> asyncio.Task[str]:
        asking = asyncio.create_task(self._ask(form, key))
        await settled()
        return asking

    async def _ask(self, form: str, key: str) -> str:
        try:
            await self.check.check("regex", form, fair_key=key)
        except GrammarError as error:
            return str(error)
        except GrammarsBusyError:
            return "busy"
        return ""


async def test_clients_take_turns() -> None:
    bench = Bench()
    asked = [("a1", "alice"), ("a2", "alice"), ("a3", "alice"), ("b1", "bob"), ("c1", "carol")]
    asking = [await bench.ask(*one) for one in asked]
    await bench.quick.find("", "", "", "", "")

    assert bench.quick.begun == ["a1", "a2", "b1", "c1", "a3"]
    assert [await one for one in asking] == [""] * 5


async def test_a_form_that_takes_long_keeps_no_quick_one_waiting_not_even_its_clients() -> None:
    bench = Bench()
    long = await bench.ask("long")
    await bench.quick.find(TOO_COMPLEX)
    quick = await bench.ask("quick")
    await bench.quick.find("")

    assert await quick == ""
    assert not long.done()
    await bench.slow.find("")
    assert await long == ""
    assert (bench.quick.begun, bench.slow.begun) == (["long", "quick"], ["long"])
    assert (bench.quick.limits_s, bench.slow.limits_s) == ({QUICK_CPU_S}, {CPU_S})


async def test_clients_take_turns_with_forms_that_take_long() -> None:
    bench = Bench()
    for form, key in (("a1", "alice"), ("a2", "alice"), ("a3", "alice"), ("b1", "bob")):
        await bench.ask(form, key)
    await bench.quick.find(*[TOO_COMPLEX] * 4)
    await bench.slow.find(*[""] * 4)

    assert bench.slow.begun == ["a1", "a2", "b1", "a3"]


async def test_a_form_is_compiled_once_for_all_that_ask_for_it() -> None:
    bench = Bench()
    first = await bench.ask("other", "alice")
    asking = [await bench.ask("form", key) for key in ("alice", "bob", "alice")]
    await bench.quick.find("", "fault")
    asking.append(await bench.ask("form", "carol"))

    assert [await one for one in asking] == ["fault"] * 4
    assert await first == ""
    assert bench.quick.begun == ["other", "form"]
    assert bench.quick.is_idle


async def test_a_form_waits_for_the_turn_of_the_first_of_its_clients() -> None:
    bench = Bench()
    for form in ("a1", "a2", "a3", "shared"):
        await bench.ask(form, "alice")
    await bench.ask("shared", "bob")
    await bench.quick.find("", "", "")

    assert bench.quick.begun[:3] == ["a1", "a2", "shared"]


async def test_a_form_that_is_known_to_take_long_goes_to_the_slow_lane_at_once() -> None:
    bench = Bench()
    first = await bench.ask("long")
    await bench.quick.find(TOO_COMPLEX)
    await bench.slow.find(NoVerdictError())
    again = await bench.ask("long", "bob")
    await bench.slow.find("")

    assert (await first, await again) == ("busy", "")
    assert (bench.quick.begun, bench.slow.begun) == (["long"], ["long", "long"])


@pytest.mark.parametrize("fault", [TOO_COMPLEX, DEADLY])
async def test_what_may_have_been_the_machine_is_forgotten_after_a_while(fault: str) -> None:
    bench = Bench()
    asking = [await bench.ask("form"), await bench.ask("bad")]
    await bench.quick.find(TOO_COMPLEX, "fault")
    await bench.slow.find(fault)
    bench.now_s = DOUBT_S - 0.1
    asking += [await bench.ask("form"), await bench.ask("bad")]
    assert [await one for one in asking] == [fault, "fault"] * 2
    assert bench.quick.begun == ["form", "bad"]

    bench.now_s = DOUBT_S
    asking = [await bench.ask("bad"), await bench.ask("form")]
    await bench.quick.find("")
    assert [await one for one in asking] == ["fault", ""]


async def test_no_verdict_is_told_to_all_that_wait_and_not_remembered() -> None:
    bench = Bench()
    asking = [await bench.ask("form", key) for key in ("alice", "bob")]
    await bench.quick.find(NoVerdictError())
    assert [await one for one in asking] == ["busy", "busy"]

    again = await bench.ask("form")
    await bench.quick.find("")
    assert await again == ""


async def test_a_request_waits_for_so_long_and_finds_the_verdict_later() -> None:
    bench = Bench(max_wait_s=0.01)
    assert await (await bench.ask("form")) == "busy"
    assert await (await bench.ask("waits in vain")) == "busy"
    await bench.quick.find("fault")

    assert await (await bench.ask("form")) == "fault"
    assert bench.quick.begun == ["form"]
    assert bench.quick.is_idle


async def test_a_form_is_begun_only_for_a_request_that_waits() -> None:
    bench = Bench()
    begun, gone, shared = [await bench.ask(form) for form in ("begun", "gone", "shared")]
    stays = await bench.ask("shared", "bob")
    for leaving in (begun, gone, shared):
        leaving.cancel()
    await settled()
    assert not bench.quick.is_idle
    await bench.quick.find("fault", "")

    assert await stays == ""
    assert bench.quick.begun == ["begun", "shared"]
    assert await (await bench.ask("begun")) == "fault"  # which was found out all the same


async def test_a_client_has_so_many_forms_waiting_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_lane, "MAX_FORMS", 2)
    bench = Bench()
    known = await bench.ask("known")
    await bench.quick.find("")
    asked = ["a", "a", "b", "b", "c", "known"]
    alices = [await bench.ask(form) for form in asked]
    bobs = await bench.ask("c", "bob")
    assert [one.done() for one in alices] == [False, False, False, False, True, True]
    await bench.quick.find("", "", "")

    assert [await one for one in alices] == ["", "", "", "", "busy", ""]
    assert (await known, await bobs) == ("", "")
    again = [await bench.ask(form) for form in "de"]
    await bench.quick.find("", "")
    assert [await one for one in again] == ["", ""]


async def test_a_fault_of_our_own_is_told_and_the_next_form_is_compiled() -> None:
    bench = Bench()
    failing, following = await bench.ask("a"), await bench.ask("b")
    await bench.quick.find(KeyError("a bug"), "")

    assert await following == ""
    with pytest.raises(KeyError):
        await failing


async def test_closing_breaks_off_what_is_compiled() -> None:
    bench = Bench()
    asking = await bench.ask("form")
    await bench.check.close()

    assert bench.quick.is_idle
    assert (bench.quick.is_closed, bench.slow.is_closed) == (True, True)
    with pytest.raises(asyncio.CancelledError):
        await asking
