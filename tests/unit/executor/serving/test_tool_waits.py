"""How long tools take: measured by their calls' ids, told by a quantile of the newest waits."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.executor.serving.tool_waits import (
    DEFAULT_WAIT_S,
    MAX_LABELS,
    MAX_PENDING,
    MAX_WAITS,
    MIN_WAITS,
    QUANTILE,
    ToolWaits,
    WaitBook,
)
from services.executor.types import Submission
from services.generation.conversation import ChatMessage, ToolCall
from services.generation.prompts import ChatPrompt
from services.generation.retention import RetentionHint
from services.kit.capped_labels import OTHER

WAIT_COUNT = "evenflow_executor_tool_wait_seconds_count"


class Agent:
    """A client whose conversation calls tools; the clock is the test's."""

    def __init__(self, waits: ToolWaits, *, key: str = "alice", says: str = "Go on.") -> None:
        self._waits, self._key = waits, key
        self._turns = [ChatMessage(role="user", content=says)]
        self._num_calls = 0

    def _submission(self, **fields: Any) -> Submission:
        return Submission(
            request_id="r",
            generation=1,
            model="m",
            prompt=ChatPrompt(tuple(self._turns)),
            cache_salt=self._key,
            retention=RetentionHint(account=self._key),
            **fields,
        )

    def calls(self, *tools: str, ids: Sequence[str] = ()) -> float:
        """Return for how long a turn with calls is kept."""
        self._num_calls += 1
        names = ids or [f"{id(self)}-{self._num_calls}-{n}" for n in range(len(tools))]
        calls = [
            ToolCall(id=one, name=tool, arguments="{}")
            for one, tool in zip(names, tools, strict=True)
        ]
        seconds = self._waits.ended(self._submission(), calls)
        self._turns.append(ChatMessage(role="assistant", content="", tool_calls=tuple(calls)))
        return seconds

    def brings(self) -> None:
        """Send the next turn, with the results of the last one's calls."""
        results = [
            ChatMessage(role="tool", content="42", tool_call_id=call.id)
            for call in self._turns[-1].tool_calls
        ]
        self._turns += results
        self._waits.arrived(self._submission())


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> ToolWaits:
    return ToolWaits(clock)


def work(agent: Agent, clock: Clock, tool: str, *seconds: float) -> None:
    for wait_s in seconds:
        agent.calls(tool)
        clock.now_s += wait_s
        agent.brings()


@given(st.lists(st.floats(0.0, 1e5), max_size=3 * MAX_WAITS))
def test_a_quantile_is_the_least_wait_that_its_share_of_the_newest_do_not_exceed(
    waits_s: list[float],
) -> None:
    book = WaitBook[str](max_keys=2)
    for wait_s in waits_s:
        book.add("k", wait_s)
    newest, found = waits_s[-MAX_WAITS:], book.quantile_s("k")

    if len(newest) < MIN_WAITS:
        assert found is None
        return
    assert found in newest
    num_needed = ceil(QUANTILE * len(newest))
    assert sum(one <= found for one in newest) >= num_needed
    assert sum(one < found for one in newest) < num_needed


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.0, 9.0)), max_size=60))
def test_the_keys_that_waited_last_are_known_and_no_more(waited: list[tuple[int, float]]) -> None:
    book = WaitBook[int](max_keys=3)
    for key, wait_s in waited:
        book.add(key, wait_s)

    last = list(dict.fromkeys(key for key, _ in reversed(waited)))
    assert list(book._waits_s) == last[2::-1]


def test_a_tool_is_waited_for_as_long_as_it_takes(waits: ToolWaits, clock: Clock) -> None:
    agent = Agent(waits)

    work(agent, clock, "search", 3.0, 4.0, 5.0, 20.0)

    assert agent.calls("search") == 20.0


def test_another_tool_of_the_key_takes_as_long_as_its_tools_do(
    waits: ToolWaits, clock: Clock
) -> None:
    work(Agent(waits), clock, "search", 3.0, 3.0, 3.0, 3.0)

    assert Agent(waits).calls("build") == 3.0
    assert Agent(waits, key="bob").calls("search") == DEFAULT_WAIT_S


def test_too_few_waits_say_nothing(waits: ToolWaits, clock: Clock) -> None:
    agent = Agent(waits)
    work(agent, clock, "search", *[1.0] * (MIN_WAITS - 1))
    assert agent.calls("search") == DEFAULT_WAIT_S


def test_several_calls_are_waited_for_as_the_slowest_one_and_measured_once(
    waits: ToolWaits, clock: Clock
) -> None:
    agent = Agent(waits)
    work(agent, clock, "look", *[1.0] * MIN_WAITS)
    work(agent, clock, "build", *[50.0] * MIN_WAITS)
    before = REGISTRY.get_sample_value(WAIT_COUNT, {"tool": "look"})

    assert agent.calls("look", "build", "look") == 50.0
    clock.now_s += 30.0
    agent.brings()

    assert REGISTRY.get_sample_value(WAIT_COUNT, {"tool": "look"}) == (before or 0.0) + 1
    assert agent.calls("look") == 30.0  # five waits, of which the longest is within nine tenths


def test_a_result_that_comes_again_is_no_wait(waits: ToolWaits, clock: Clock) -> None:
    agent = Agent(waits)
    work(agent, clock, "search", 2.0, 2.0, 2.0, 2.0)
    clock.now_s += 500.0
    waits.arrived(agent._submission())

    assert agent.calls("search") == 2.0


def test_ids_that_a_model_counts_do_not_mix_conversations(waits: ToolWaits, clock: Clock) -> None:
    slow, quick = Agent(waits, says="Build."), Agent(waits, says="Look.")
    for _ in range(MIN_WAITS):
        slow.calls("build", ids=["functions.f:0"])
        clock.now_s += 40.0
        quick.calls("look", ids=["functions.f:0"])
        clock.now_s += 2.0
        quick.brings()
        slow.brings()

    assert slow.calls("build", ids=["functions.f:1"]) == 42.0
    assert quick.calls("look", ids=["functions.f:1"]) == 2.0


def test_what_was_called_longest_ago_is_forgotten(waits: ToolWaits, clock: Clock) -> None:
    first, second = Agent(waits), Agent(waits)
    first.calls("search")
    second.calls("search")
    agent = Agent(waits)
    for number in range(MAX_PENDING - 1):
        agent.calls("other", ids=[f"c{number}"])
        agent._turns.pop()
    clock.now_s += 7.0
    first.brings()
    second.brings()

    assert len(waits._by_account._waits_s["alice"]) == 1
    assert len(waits._pending) == MAX_PENDING - 1


def test_metrics_name_so_many_tools_and_no_more(
    waits: ToolWaits, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(waits)
    for number in range(MAX_LABELS + 2):
        work(agent, clock, f"tool-{number}", 1.0)

    def count(tool: str) -> float | None:
        return REGISTRY.get_sample_value(WAIT_COUNT, {"tool": tool})

    assert count(f"tool-{MAX_LABELS - 1}") == 1
    assert count(f"tool-{MAX_LABELS}") is None
    assert count(OTHER) == 2
