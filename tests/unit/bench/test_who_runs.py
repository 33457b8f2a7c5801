"""Rows of `bench.who_runs`."""

from bench.who_runs.__main__ import mean_of


def test_a_count_that_one_seed_alone_has_is_nothing_in_the_others() -> None:
    seen = {"regime": "r", "policy": "p", "seed": 1, "tokens_per_s": 10.0, "plans_dropped": 3.0}
    unseen = {"regime": "r", "policy": "p", "seed": 2, "tokens_per_s": 20.0}

    row = mean_of([unseen, seen])

    assert (row["tokens_per_s"], row["plans_dropped"]) == (15.0, 1.5)
    assert row["runs"] == [unseen, seen]
