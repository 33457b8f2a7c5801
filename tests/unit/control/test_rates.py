"""Measured rates, and how many blocks write-through may order with them."""

import pytest

from services.control.rates import Rates, write_budget_blocks


def measured(*, d2h_bytes_per_s: float | None = 1_000.0, step_s: float | None = 0.1) -> Rates:
    rates = Rates(block_bytes=10)
    rates.d2h_bytes_per_s.value = d2h_bytes_per_s
    rates.step_s.value = step_s
    return rates


def budget(rates: Rates, *, max_blocks: int = 50, num_under_way: int = 0) -> int:
    return write_budget_blocks(rates, max_blocks=max_blocks, num_under_way=num_under_way)


def test_a_step_orders_what_the_link_moves_in_a_step() -> None:
    assert budget(measured()) == 10  # 1000 bytes/s for 0.1 s are 10 blocks of 10 bytes


def test_the_option_is_a_ceiling_and_zero_switches_write_through_off() -> None:
    assert budget(measured(), max_blocks=7) == 7
    assert budget(measured(), max_blocks=0) == 0


def test_a_link_too_slow_for_a_block_per_step_still_mirrors() -> None:
    assert budget(measured(d2h_bytes_per_s=1.0)) == 1


@pytest.mark.parametrize(("num_under_way", "expected"), [(20, 10), (25, 5), (30, 0), (31, 0)])
def test_copies_under_way_hold_further_ones_back(num_under_way: int, expected: int) -> None:
    assert budget(measured(), num_under_way=num_under_way) == expected


def test_without_measurements_the_option_decides() -> None:
    assert budget(measured(d2h_bytes_per_s=None)) == 50
    assert budget(measured(step_s=None)) == 50


def test_the_link_is_as_fast_as_its_slowest_rank_and_an_idle_one_says_nothing() -> None:
    rates = Rates(block_bytes=10)
    rates.note_copies(
        {
            "0": {"h2d_bytes": 100, "h2d_busy_s": 0.1, "d2h_bytes": 0, "d2h_busy_s": 0.0},
            "1": {"h2d_bytes": 100, "h2d_busy_s": 0.2, "d2h_bytes": 0, "d2h_busy_s": 0.0},
        }
    )
    assert rates.h2d_bytes_per_s.value == pytest.approx(500.0)
    assert rates.d2h_bytes_per_s.value is None


def test_prefill_is_measured_beyond_what_the_decodes_of_its_step_take() -> None:
    rates = Rates(block_bytes=10)
    rates.note_step(0.1, num_tokens=4, num_prefill_tokens=0)
    rates.note_step(0.6, num_tokens=104, num_prefill_tokens=100)

    assert rates.step_s.value == pytest.approx(0.1)
    assert rates.prefill_tokens_per_s.value == pytest.approx(200.0)  # 100 tokens in 0.5 s


def test_averages_follow_their_samples_slowly() -> None:
    rates = Rates(block_bytes=10)
    rates.note_step(0.1, num_tokens=1, num_prefill_tokens=0)
    rates.note_step(0.2, num_tokens=1, num_prefill_tokens=0)

    assert rates.step_s.value == pytest.approx(0.12)  # a fifth of the way
