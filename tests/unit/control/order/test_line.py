"""A request waits for the turn before it if that is on the host sooner than computed."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.control.measures.rates import Rates
from services.control.order.line import Line
from services.control.prefixes.anchors import ComingTurn
from services.placement.run.resume import PromptCost
from tests.unit.control.fake_engine import FakeEngine

BLOCK_BYTES = 1_000
RATES = Rates(d2h_bytes_per_s=1e6, prompt=PromptCost(token_s=0.01))


def line_of(engine: FakeEngine, rates: Rates) -> Line[Any, Any]:
    resumes: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, is_short_of_blocks=False)
    return Line(engine, resumes, lambda: rates)


@pytest.mark.parametrize(
    ("num_running", "num_blocks", "rates", "waits"),
    [
        (0, 100, RATES, True),  # 0.1 s for copies, 0.1 s for ten tokens
        (0, 101, RATES, False),
        (2, 300, RATES, True),  # whose steps last longer, too
        (2, 301, RATES, False),
        (0, 10_000, Rates(), True),  # nothing is measured yet
    ],
)
def test_a_turn_is_waited_for_if_its_copies_end_before_its_tokens_would_be_computed(
    num_running: int, num_blocks: int, rates: Rates, waits: bool
) -> None:
    engine = FakeEngine(*(f"running{n}" for n in range(num_running)))
    engine.add("next").kv = None
    engine.coming_turns["next"] = ComingTurn(num_tokens=50, num_more=10, num_blocks=num_blocks)
    line = line_of(engine, rates)

    num_tokens = line.num_host_tokens(engine.requests["next"])

    assert num_tokens == (None if waits else 0)


def test_one_that_has_begun_waits_for_no_turn() -> None:
    engine = FakeEngine()
    record = engine.add("next")
    record.kv.asleep = False
    engine.coming_turns["next"] = ComingTurn(num_tokens=50, num_more=10, num_blocks=1)

    assert line_of(engine, RATES).num_host_tokens(engine.requests["next"]) == record.kv.num_tokens
