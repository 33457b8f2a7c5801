"""What a stream of samples says about base, per-token and per-context times."""

import pytest

from services.control.measures.fits import NonNegativeFit


def fit_of(samples: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    fit = NonNegativeFit()
    for u, v, y in samples:
        fit.add(u, v, y)
    return fit.solve()


def test_batches_that_vary_give_all_three_coefficients() -> None:
    batches = [(1.0, 100.0), (4.0, 100.0), (2.0, 900.0), (8.0, 3_000.0), (3.0, 50.0)]

    found = fit_of([(u, v, 2e-3 + 1e-4 * u + 1e-6 * v) for u, v in batches])

    assert found == pytest.approx((2e-3, 1e-4, 1e-6), rel=1e-3)


def test_a_batch_that_never_changes_is_all_base() -> None:
    assert fit_of([(4.0, 1_000.0, 5e-3)] * 10) == pytest.approx((5e-3, 0.0, 0.0))


def test_no_coefficient_is_ever_negative() -> None:
    # Slower with fewer tokens: no plane with b >= 0 explains it better than a constant.
    found = fit_of([(1.0, 10.0, 9e-3), (8.0, 20.0, 1e-3), (1.0, 30.0, 9e-3), (8.0, 40.0, 1e-3)])

    assert min(found) >= 0.0
    assert found[0] > 0.0
    assert found[1] == 0.0


def test_nothing_is_known_before_the_first_sample() -> None:
    assert NonNegativeFit().solve() == (0.0, 0.0, 0.0)
