"""lambda, by hand."""

from services.placement.link_ratio import link_ratio


def test_the_ratio_is_a_steps_copies_over_the_pool() -> None:
    # 1 GB/s moves 20 MB in 20 ms: a fifth of 100 MB.
    assert link_ratio(link_bytes_per_s=1e9, step_s=0.02, pool_bytes=100e6) == 0.2
