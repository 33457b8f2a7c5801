"""How many blocks write-through may order with what is measured."""

import pytest

from services.control.measures.rates import Rates, write_budget_blocks


def measured(*, d2h_bytes_per_s: float | None = 1_000.0, step_s: float | None = 0.1) -> Rates:
    return Rates(d2h_bytes_per_s=d2h_bytes_per_s, step_s=step_s)


def budget(rates: Rates, *, max_blocks: int = 50, num_under_way: int = 0) -> int:
    return write_budget_blocks(
        rates, block_bytes=10, max_blocks=max_blocks, num_under_way=num_under_way
    )


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
