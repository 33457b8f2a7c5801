"""Rows of `bench.who_runs`."""

import pytest

from bench.who_runs import sessions
from bench.who_runs.__main__ import mean_of, measured


def test_a_count_that_one_seed_alone_has_is_nothing_in_the_others() -> None:
    seen = {"regime": "r", "policy": "p", "seed": 1, "tokens_per_s": 10.0, "plans_dropped": 3.0}
    unseen = {"regime": "r", "policy": "p", "seed": 2, "tokens_per_s": 20.0}

    row = mean_of([unseen, seen])

    assert (row["tokens_per_s"], row["plans_dropped"]) == (15.0, 1.5)
    assert row["runs"] == [unseen, seen]


def test_a_regime_of_sessions_says_where_ours_is_behind() -> None:
    def row(policy: str, ttft_s: float, tokens: float) -> dict[str, object]:
        return {
            "regime": "r", "policy": policy, "lambda": 0.1, "cached": 0.5,
            "next_ttft_p50_s": ttft_s, "next_ttft_p95_s": 2 * ttft_s, "tokens_per_s": tokens,
            "recomputed_tokens": 7.0,
        }  # fmt: skip

    rows = [row("vllm", 1.0, 100.0), row("vllm-offloading", 0.1, 100.0), row("evenflow", 0.2, 99.5)]
    beside_vllm, beside_tier = sessions.verdicts(rows)

    assert beside_vllm.startswith("r: beside vllm 0.200 x the next step's TTFT at P50, 0.200 x")
    assert not beside_vllm.endswith("behind")
    assert beside_tier.endswith(": behind")
    assert [len(cells) for cells in sessions.table(rows)] == [8] * 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "regime",
    [
        "bench 300 MB/s, S x 1.0",
        "bench 300 MB/s, S x 1.5",
        "bench 50 MB/s, S x 2.5",
        "7B, H100, 9k + 600, 1.0/s",
        "8B, H100, 24k + 800, 0.8/s",
        "8B, A5000, 6k + 800, 0.15/s",
        "8B, A5000, 6k + 800, 0.25/s",
        "ShareGPT, unpaced, load 1.2",
        "ShareGPT, half, load 1.2",
        "ShareGPT, mixed, load 1.2",
        "demo, four at once",
        "TokenFlow, 4090 (a)",
        "LayerKV, L20, 4,096 + 512",
    ],
)
def test_the_default_is_nowhere_behind_vllms_queue(regime: str) -> None:
    vllm, ours = (measured(regime, policy, 1) for policy in ("vllm", "evenflow"))

    assert ours["tokens_per_s"] >= 0.98 * vllm["tokens_per_s"]
    assert ours.get("tbt_deposit", 1.0) >= vllm.get("tbt_deposit", 1.0) - 0.005
    assert ours.get("tpot_deposit", 1.0) >= vllm.get("tpot_deposit", 1.0) - 0.02
    assert ours["rebuffering"] <= vllm["rebuffering"]
    assert ours["ttft_s"] <= 1.02 * vllm["ttft_s"]
    assert ours["ttft_p95_s"] <= 1.02 * vllm["ttft_p95_s"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("regime", "host_frac"),
    [
        ("bench 300 MB/s, S x 1.5", 0.5),
        ("8B, A5000, 6k + 800, 0.25/s", 0.5),
        ("ShareGPT, half, load 1.2", 0.5),
        ("TokenFlow, 4090 (b)", 0.1),
        ("eLLM, 70B, L-Eval, load 1.2", None),  # about one pool's room
    ],
)
def test_nobody_loses_by_a_small_host(regime: str, host_frac: float | None) -> None:
    vllm, ours = (measured(regime, policy, 1, host_frac) for policy in ("vllm", "evenflow"))

    assert ours["tokens_per_s"] >= 0.98 * vllm["tokens_per_s"]
    assert ours["ttft_s"] <= 1.02 * vllm["ttft_s"]
    assert ours["rebuffering"] <= 1.05 * vllm["rebuffering"]
