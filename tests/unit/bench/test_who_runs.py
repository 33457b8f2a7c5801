"""Rows of `bench.who_runs`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bench.document import around_table
from bench.who_runs import ablation, beside_people, sessions
from bench.who_runs.__main__ import mean_of, measured, run
from bench.who_runs.pages import FOUND, TABLES, beside_vllm, crossed, side_by_side
from bench.who_runs.reading_tables import READING_TABLES
from bench.who_runs.regimes import all_regimes

RESULTS = Path(__file__).parents[3] / "docs/results"
PAGES = {  # of tables that are not their page's own
    "joint": "policies.md",
    "people": "sessions.md",
    **dict.fromkeys(READING_TABLES, "reading.md"),
}


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
            "recomputed_tokens": 7.0, "rejected": 0.0,
        }  # fmt: skip

    rows = [row("vllm", 1.0, 100.0), row("vllm-offloading", 0.1, 100.0), row("evenflow", 0.2, 99.5)]
    beside_vllm, beside_tier = sessions.verdicts(rows)

    assert beside_vllm.startswith("r: beside vllm 0.200 x the next step's TTFT at P50, 0.200 x")
    assert not beside_vllm.endswith("behind")
    assert beside_tier.endswith(": behind")
    assert [len(cells) for cells in sessions.table(rows)] == [9] * 4


def test_agents_beside_people_say_where_ours_is_behind() -> None:
    def row(policy: str, p95_s: float, tokens: float) -> dict[str, object]:
        return {
            "regime": "r", "policy": policy, "lambda": 0.1, "people_ttft_p50_s": 0.1,
            "people_ttft_p95_s": p95_s, "people_within_slo": 1.0, "tbt_deposit": 1.0,
            "agents_tokens_per_s": tokens, "agents_e2e_s": 1.0, "next_ttft_p95_s": 0.2,
            "recomputed_tokens": 7.0,
        }  # fmt: skip

    rows = [row("vllm", 1.0, 100.0), row("vllm-offloading", 0.5, 98.0), row("evenflow", 0.5, 98.0)]
    beside_vllm, beside_tier = beside_people.verdicts(rows)

    assert beside_vllm == (
        "r: beside vllm people's first token at P95 in 0.500 x the time, +0.00 points in time, "
        "agents' tokens/s 0.980 x: behind"
    )
    assert not beside_tier.endswith("behind")
    assert {len(cells) for cells in beside_people.table(rows)} == {11}


@pytest.mark.parametrize("rules", ablation.WITHOUT)
def test_each_rule_can_be_out_of_force(rules: str) -> None:
    case = all_regimes()["demo, four at once"](1)
    with ablation.out_of_force(rules):
        record, _ = run(replace(case, requests=case.requests[:2]), "evenflow")

    assert all(one.generated_s for one in record.outcomes)


def test_people_come_while_agents_are_at_work() -> None:
    regime = beside_people.regimes()["8B, 4090, 24 agents, people at 0.6/s"]
    asked = regime(1).requests

    arrivals_s = [one.arrival_s for one in asked]
    people = [one for one in asked if one.level.slo_ttft_s]
    assert arrivals_s == sorted(arrivals_s)
    assert people == beside_people.people(0.6, 1)
    assert people[-1].arrival_s < beside_people.WINDOW_S
    assert len(people) / beside_people.WINDOW_S == pytest.approx(0.6, rel=0.2)
    assert len(asked) - len(people) == 24 * 12


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


def row(policy: str, tokens_per_s: float, **more: float) -> dict[str, object]:
    told = {"lambda": 0.025, "ttft_s": 2.0, "ttft_p50_s": 1.0, "ttft_p95_s": 4.0, "parks": 3.0}
    shares = {"tbt_deposit": 0.99, "tpot_deposit": 1.0, "rebuffering": 0.01, "cached": 0.5}
    return {"regime": "r", "policy": policy, "tokens_per_s": tokens_per_s, **told, **shares, **more}


def test_the_default_is_beside_vllms_best_setting() -> None:
    rows = [row("vllm", 50.0), row("vllm@0.02", 100.0), row("evenflow", 110.0, ttft_s=1.0)]

    header, line = beside_vllm(rows, others=(FOUND,))

    assert header == ["regime (lambda)", "tokens/s", "ratio", "TTFT mean, s", "ratio", "found, %"]
    assert line == [
        *("r (2.5 %)", "100.0 (0.02) → 110.0", "1.100"),
        *("2.00 → 1.00", "0.500", "50 → 50"),
    ]


def test_two_policies_are_side_by_side_in_the_order_that_is_asked_for() -> None:
    rows = [row("b", 2.0, parks=7.0), row("a", 1.0)]

    header, line = side_by_side(rows, ("a", "b"))

    assert len(header) == len(line)
    assert (line[1], line[-1]) == ("1.0 / 2.0", "7")


def test_policies_stand_below_each_other_and_regimes_beside() -> None:
    rows = [{**row(policy, 1.0), "regime": name} for name in "rs" for policy in "ab"]
    del rows[0]["tbt_deposit"]

    assert crossed(rows, "policy") == [
        ["policy", "r (2.5 %)", "s (2.5 %)"],
        ["a", "1.0; - / 100 / 1.00; 2.0 / 1.0 / 4.0", "1.0; 99.00 / 100 / 1.00; 2.0 / 1.0 / 4.0"],
        ["b", *2 * ["1.0; 99.00 / 100 / 1.00; 2.0 / 1.0 / 4.0"]],
    ]


def of_rate(policy: str, rate: str, tokens_per_s: float, ttft_s: float) -> dict[str, object]:
    found = row(policy, tokens_per_s, ttft_s=ttft_s, ttft_p99_s=9.0)
    return {**found, "regime": f"reading: p, load 1.0, {rate}"}


def test_readers_of_each_rate_are_in_one_line_beside_vllm() -> None:
    rows = [
        *(of_rate("vllm", "5/s", 100.0, 4.0), of_rate("vllm@0.02", "5/s", 90.0, 1.0)),
        *(of_rate("evenflow", "4/s", 101.0, 1.0), of_rate("evenflow", "5/s", 102.0, 2.0)),
    ]

    header, line = READING_TABLES["reading-rates"].write(rows)

    assert dict(zip(header, line, strict=True)) == {
        "regime (lambda)": "p, load 1.0 (2.5 %)",
        "TTFT, `vllm`": "4.00 / 9.0",
        "4/s": "1.00 / 9.0; 1.010",
        "5/s": "2.00 / 9.0; 1.020",
        **dict.fromkeys(["6/s", "8/s", "12/s", "20/s"], "-"),
    }


@pytest.mark.parametrize("name", [name for name in READING_TABLES if name != "reading-rates"])
def test_each_table_of_readers_has_a_line_for_each_regime(name: str) -> None:
    kinds = {"people_within_slo": 0.5, "people_ttft_s": 1.0, "agents_ttft_s": 1.0}
    more = {**kinds, "agents_e2e_s": 9.0, "unread": 0.2, "unmade": 0.1, "read_tokens_per_s": 7.0}
    fluid = {"fluid_ttft_p50_s": 0.4, "fluid_ttft_p99_s": 2.0, "ttft_p99_s": 8.0}
    table = READING_TABLES[name]

    def rows(regimes: Sequence[str], policies: Sequence[str]) -> list[dict[str, object]]:
        made = product(regimes, policies)
        return [{**row(policy, 1.0, **more, **fluid), "regime": one} for one, policy in made]

    header, *lines = table.write(table.measured(rows))

    assert [line[0] for line in lines] == [
        f"{one.removeprefix('reading: ')} (2.5 %)" for one in table.regimes()
    ]
    assert {len(line) for line in lines} == {len(header)}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_room_for_each_table(name: str) -> None:
    assert TABLES[name](name).name == name
    assert around_table(RESULTS / PAGES.get(name, f"{name}.md"), name)
