"""Figures of the end-to-end benchmark, by hand."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.e2e.deposit_picture import most_covered, picture
from bench.e2e.drafting import with_drafts
from bench.e2e.figures import (
    estimates,
    quantile,
    request_figures,
    run_figures,
    why_not_counted,
)
from bench.e2e.records import RequestRecord, RunKey, RunRecord, Sample, load, save
from bench.e2e.report import plot, rows_of, tables
from bench.e2e.systems import SYSTEMS
from bench.e2e.trace import poisson_trace, stated_slos_s
from lab import known_drafts
from lab.known_drafts import KNOWN_ANSWERS, Known, save_answers


def make_request(*generated_s: float, submitted_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        request_id="r", submitted_s=submitted_s, num_prompt_tokens=7, generated_s=generated_s
    )


def make_run(*requests: RequestRecord, seed: int = 1, **fields: object) -> RunRecord:
    key = RunKey(system="orbitflow", seed=seed, slo_scale=1.5)
    return RunRecord(key=key, slo_s=1.0, requests=requests, samples=(), **fields)  # type: ignore[arg-type]


def test_a_gap_violates_without_a_deposit_and_is_covered_with_one() -> None:
    # Due at 1, 2, 3, 4 with S = 1; the gap of 2.5 s exceeds S, the token is needed at 4.
    figures = request_figures(make_request(1.0, 1.2, 1.4, 3.9), slo_s=1.0)

    assert figures.gaps_s == pytest.approx((0.2, 0.2, 2.5))
    assert (figures.num_in_time, figures.num_in_time_deposit) == (2, 3)


def test_a_deposit_that_runs_dry_does_not_cover() -> None:
    # Due at 1, 2; the third token is needed at 3 and comes at 3.1, beyond the 5 ms.
    figures = request_figures(make_request(1.0, 1.2, 3.1), slo_s=1.0)

    assert figures.num_in_time_deposit == 1


def test_tpot_is_measured_as_generated_and_as_delivered() -> None:
    fast = request_figures(make_request(0.0, 0.1, 0.2), slo_s=1.0)
    slow = request_figures(make_request(0.0, 3.0), slo_s=1.0)
    short = request_figures(make_request(0.0), slo_s=1.0)

    assert (fast.tpot_met, slow.tpot_met, short.tpot_met) == (True, False, None)
    assert (fast.tpot_met_deposit, slow.tpot_met_deposit) == (True, False)


def test_a_pause_is_one_late_token_and_rebuffering_as_long_as_it_lasts() -> None:
    # Due at 0, 1 and 2; a token is there 7 s after its turn, of 3 s to read.
    found = estimates([make_run(make_request(0.0, 0.1, 0.2, 10.0))])

    assert found["tbt_deposit"].value == pytest.approx(2 / 3)
    assert found["rebuffering"].value == pytest.approx(7 / 3)
    assert estimates([make_run(make_request(0.0))])["rebuffering"].value == 0.0


def test_estimates_pool_the_requests_of_all_runs_and_enclose_the_value() -> None:
    runs = [
        make_run(*(make_request(0.0, 0.5, 1.0) for _ in range(20))),
        make_run(*(make_request(0.0, 2.0, 2.5) for _ in range(20)), seed=2),
    ]

    found = estimates(runs)

    assert found["tbt"].value == pytest.approx(0.75)  # 40 + 20 of 80 gaps
    assert 0.6 < found["tbt"].low < 0.75 < found["tbt"].high < 0.9
    assert estimates(runs) == found


def test_a_run_as_a_whole() -> None:
    samples = (
        Sample(time_s=0.0, pool_used_frac=0.5, offloaded_frac=0.2, num_requests=1, num_held=0),
        Sample(time_s=1.0, pool_used_frac=0.0, offloaded_frac=0.0, num_requests=0, num_held=0),
    )
    run = RunRecord(
        key=RunKey(system="s", seed=1, slo_scale=1.0),
        slo_s=1.0,
        requests=(make_request(1.0, 2.0, 3.0), make_request(3.0, 5.0, submitted_s=1.0)),
        samples=samples,
        sums={
            "controller_measured_step_s": 10.0,
            "controller_abs_error_s": 0.5,
            "controller_measured_prompt_step_s": 4.0,
            "controller_prompt_abs_error_s": 0.1,
        },
    )

    figures = run_figures(run)

    assert figures["tokens_per_s"] == 1.0  # 5 tokens in 5 s
    assert figures["requests_per_min"] == 24.0
    # All five are read at once. 1 and 2 s to the first token, and 1 s late in the second answer.
    assert figures["effective_tokens_per_s"] == 1.0
    assert figures["qos"] == pytest.approx((5 - (1 + 2 + 1)) / 5)
    assert figures["pool"] == 0.5  # idle moments do not count
    assert figures["mape"] == 0.05
    assert figures["mape_prompts"] == 0.025


def test_what_does_not_count_says_why() -> None:
    assert len(why_not_counted([make_run(make_request(0.0))])) == 3
    long = make_request(*(float(t) for t in range(100)))
    enough = [make_run(*[long] * 60, seed=seed) for seed in (1, 2, 3)]
    assert why_not_counted(enough) == []
    assert why_not_counted(enough[:2]) == ["fewer than 3 seeds"]


def test_a_run_survives_its_file(tmp_path) -> None:
    run = make_run(make_request(0.0, 1.0), sums={"a": 1.0})
    save(run, tmp_path / "run.json")

    assert load(tmp_path / "run.json") == run


def test_a_trace_depends_on_its_seed_only() -> None:
    first, again, other = (
        poisson_trace(seed=seed, num_requests=50, mean_gap_s=2.0) for seed in (1, 1, 2)
    )

    assert first == again != other
    assert first[3].prompt() == again[3].prompt()
    assert [r.arrival_s for r in first] == sorted(r.arrival_s for r in first)


def test_quantiles_at_their_boundaries() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.0) == 1.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0


def test_the_plot_has_a_bar_of_the_right_height_for_every_share() -> None:
    # Of three gaps one exceeds S as generated, and none with the deposit.
    rows = rows_of([make_run(make_request(1.0, 1.2, 1.4, 3.9))])

    bars = re.findall(r'aria-label="name: (\w+); tokens in time: ([\d.]+)%', plot(rows))

    assert [(name, float(share)) for name, share in bars] == [
        ("orbitflow", pytest.approx(100 * 2 / 3)),
        ("orbitflow", pytest.approx(100.0)),
    ]


def test_every_table_says_its_lambda() -> None:
    rows = rows_of([make_run(make_request(1.0, 1.2))])

    assert tables(rows, 0.1579).startswith("## SLO 1000.0 ms (base x 1.5), lambda 16 %\n")


def test_a_system_without_figures_is_left_out_of_the_plot() -> None:
    assert "orbitflow" not in plot(rows_of([make_run(make_request())]))


def test_a_system_that_reads_no_slo_is_measured_at_every_scale() -> None:
    request = make_request(0.0, 1.2, 2.4)  # S of `make_run`: 1 s at 1.5 times the base
    blind = replace(make_run(request), key=RunKey(system="flexgen", seed=1, slo_scale=1.5))
    other = replace(make_run(request), slo_s=2.0, key=replace(blind.key, slo_scale=3.0))
    slo_aware = replace(other, key=RunKey(system="orbitflow", seed=1, slo_scale=3.0))

    rows = {(row["slo_scale"], row["system"]): row for row in rows_of([blind, slo_aware])}

    assert rows.keys() == {(1.5, "flexgen"), (3.0, "flexgen"), (3.0, "orbitflow")}
    assert rows[1.5, "flexgen"]["tbt"]["value"] == 0.0
    assert rows[3.0, "flexgen"]["tbt"]["value"] == 1.0
    assert rows[3.0, "flexgen"]["slo_s"] == pytest.approx(2.0)


def test_who_states_nothing_counts_for_waiting_only() -> None:
    late, waiting = make_request(1.0, 3.0), make_request(3.0, 9.0)
    run = make_run(late, waiting, late, waiting)
    half = replace(run, key=replace(run.key, readers="half"))
    unpaced = replace(run, key=replace(run.key, readers="unpaced"))

    rows = {row["readers"]: row for row in rows_of([half, unpaced])}

    assert rows["half"]["rebuffering"]["value"] == pytest.approx(1.0)  # 1 s beyond each S of 1 s
    of_both = ("ttft_s", "ttft_paced_s", "ttft_unpaced_s")
    assert [rows["half"][name]["value"] for name in of_both] == [2.0, 1.0, 3.0]
    assert rows["unpaced"]["ttft_s"]["value"] == 2.0
    assert not rows["unpaced"].keys() & {"tbt", "tpot", "rebuffering", "qos", "ttft_paced_s"}
    header = next(line for line in tables([rows["unpaced"]], 0.1).splitlines() if "system" in line)
    assert "TTFT" in header
    assert "TBT" not in header


def test_one_reader_after_the_other_states_a_share_of_the_slo() -> None:
    assert stated_slos_s("mixed", 5, 2.0) == [1.5, 2.0, 4.0, 8.0, 1.5]
    assert stated_slos_s("half", 3, 2.0) == [2.0, 0.0, 2.0]


def test_a_system_that_reads_no_slo_runs_once_for_all_kinds_of_readers() -> None:
    blind = replace(
        make_run(make_request(1.0, 3.0)), key=RunKey(system="vllm", seed=1, slo_scale=1.5)
    )
    half = make_run(make_request(1.0, 3.0))
    half = replace(half, key=replace(half.key, readers="half"))

    kinds = [(row["readers"], row["system"]) for row in rows_of([blind, half])]

    assert kinds == [("half", "orbitflow"), ("half", "vllm"), ("paced", "vllm")]


def test_readers_who_leave_are_judged_by_what_they_read_and_stand_apart() -> None:
    # Two of four tokens are read, of ten that were asked for; the gap after them concerns nobody.
    left = replace(make_request(1.0, 1.5, 2.0, 9.0), leaves_after=2, num_output_tokens=10)
    stays = replace(make_request(1.0, 1.5), num_output_tokens=2)
    staying = replace(make_run(stays), key=RunKey(system="vllm", seed=1, slo_scale=1.5))
    leaving = replace(make_run(left, stays), key=replace(staying.key, leaving=0.5))
    other = replace(leaving, slo_s=2.0, key=replace(leaving.key, slo_scale=3.0))

    rows = rows_of([staying, leaving, other])

    # vLLM's run at one pace tells of all paces, but not when readers leave.
    assert [(row["leaving"], row["slo_scale"]) for row in rows] == [(0, 1.5), (0.5, 1.5), (0.5, 3)]
    found = {name: rows[1][name]["value"] for name in ("unread", "unmade", "read_tokens_per_s")}
    assert found == pytest.approx({"unread": 2 / 6, "unmade": 6 / 12, "read_tokens_per_s": 4 / 9})
    assert rows[1]["rebuffering"]["value"] == 0.0
    assert rows[1]["tbt"]["value"] == 1.0
    assert "unread" not in rows[0]
    assert "50% of the readers leave" in tables(rows, 0.1)
    assert leaving.key.name == "vllm-x1.5-s1-leaving0.5"


def test_the_request_whose_deposit_covered_most_is_drawn() -> None:
    even = make_request(0.0, 1.0, 2.0)
    late = make_request(0.0, 0.1, 0.2, 2.9)

    run, request = most_covered([make_run(even, late), make_run(even, seed=2)])

    assert (run.key.seed, request) == (1, late)
    assert picture(request, run.slo_s).startswith("<svg")


def test_runs_with_drafts_are_systems_of_their_own() -> None:
    sums = {"controller_num_decodes": 20.0, "controller_num_decoded_tokens": 50.0}
    plain = make_run(make_request(0.0, 0.1), sums=sums)
    keys = [replace(plain.key, num_drafts=3, acceptance=share) for share in (0.8, None)]
    runs = [plain, *(replace(plain, key=key) for key in keys)]

    assert len({run.key.name for run in runs}) == 3
    rows = {row["system"]: row for row in rows_of(runs)}
    assert list(rows) == [
        "orbitflow",
        "orbitflow, 3 drafts (0.8 right)",
        "orbitflow, 3 drafts (n-gram)",
    ]
    assert "tokens_per_step" not in rows["orbitflow"]
    assert rows["orbitflow, 3 drafts (n-gram)"]["tokens_per_step"]["value"] == 2.5
    assert "| 2.50 |" in tables(list(rows.values()), 0.16)


def test_drafts_are_added_to_what_a_system_asks_of_vllm() -> None:
    key = RunKey(system="vllm@0.02", seed=1, slo_scale=1.0, num_drafts=3)
    arguments = [
        json.loads(str(with_drafts(SYSTEMS[key.system], one)["ENGINE_ARGS"]))
        for one in (replace(key, num_drafts=0), key, replace(key, acceptance=0.5))
    ]
    plain, ngram, known = arguments

    assert plain == ["--watermark", "0.02"]
    assert [one[:3] for one in (ngram, known)] == [[*plain, "--speculative-config"]] * 2
    methods = [json.loads(one[3])["method"] for one in (ngram, known)]
    assert methods == ["ngram", "custom_class"]


def test_a_drafter_in_a_process_of_its_own_reads_the_answers(tmp_path, monkeypatch) -> None:
    path = tmp_path / "answers.json"
    save_answers(path, [([1, 2], [3, 4, 5])])
    given = json.dumps({"path": str(path), "right_frac": 1.0})
    monkeypatch.setenv(KNOWN_ANSWERS, given)
    monkeypatch.setattr(known_drafts, "KNOWN", Known())
    known_drafts.KnownDrafter(SimpleNamespace(num_speculative_tokens=2))

    drafts = [known_drafts.KNOWN.draft((1, 2, 3), 2) for _ in range(2)]
    assert drafts == [[4, 5]] * 2
    assert known_drafts.KNOWN.draft((2, 1), 2) == []
