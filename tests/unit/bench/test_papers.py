"""The papers' figures as cells, and their tables."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.document import circumstances
from bench.papers import ellm, layerkv, orbitflow, tokenflow
from bench.papers.__main__ import PAPERS, _run, _write
from bench.papers.cells import Found, Point, Size
from bench.papers.claims import CLAIMS, claims
from bench.papers.orbitflow import LENGTHS, LOADS, deployment, figures, recorded, shows
from bench.papers.sections import NO_AXIS, Counting, Shows, section, speed
from services.pacing.types import ServiceLevel
from simulator.comparison import sweep
from simulator.comparison.grid import Arrivals, Cell, CellResult, Workload
from simulator.report.figures import DEFINITIONS
from simulator.workload import constant_length, published_lengths

SIZE = Size(num_requests=3, num_seeds=2)


def result(**figures: float) -> CellResult:
    given = {
        "lambda": 0.05,
        "tbt": 0.5,
        "tbt_deposit": 0.75,
        "events": 10.0,
        "steps": 8.0,
        "output_tokens": 20.0,
    }
    line = {"request_id": "a", "token": [1, 2], "generated_s": [0, 1], "delivered_s": [0, 2]}
    # Two requests run for three seconds, then six for one.
    residency = [[t, 0.5, 0.0, 0.0, n, 1, 2] for t, n in ((0.0, 3), (3.0, 7), (4.0, 1))]
    view = {"residency": residency, "timelines": [line]}
    return CellResult(figures=given | figures, view=view, cpu_s=2.0)


def test_a_load_of_one_offers_what_one_request_decodes() -> None:
    cells = [point.cell for point in figures(SIZE)["8"] if point.x == 1.0]
    base_s = deployment().base_tbt_s()

    assert cells
    for cell in cells:
        offered = cell.rate_per_s * published_lengths(LENGTHS)[1].mean * base_s
        assert offered == pytest.approx(1.0)
        assert cell.slo_tbt_s == pytest.approx(cell.slo_scale * base_s)


def test_every_seed_has_every_cell() -> None:
    by_seed = {0: 0, 1: 0}
    for point in figures(SIZE)["8"]:
        by_seed[point.cell.seed] += 1

    assert by_seed[0] == by_seed[1] == 7 * 3 * len(LOADS)


def test_batches_of_all_sizes_share_one_pool_and_one_load() -> None:
    by_size = {point.x: point.cell for point in figures(SIZE)["12b"]}

    assert [cell.deployment.max_num_seqs for cell in by_size.values()] == list(by_size)
    assert len({cell.deployment.pool_tokens for cell in by_size.values()}) == 1
    assert len({cell.rate_per_s for cell in by_size.values()}) == 1


def test_a_recorded_trace_brings_its_own_pool_and_batch(tmp_path) -> None:
    rows = {
        f"request_{k}": {"input_length": 20, "output_length": 5, "arrival_time": 10 * k}
        for k in range(4)
    }
    header = {"batch_size": 3, "num_gpu_blocks_override": 40, "max_model_len": 900}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**header, "requests": rows}))
    cell = recorded(path, SIZE)[0].cell
    base_s = cell.deployment.base_tbt_s()

    assert (cell.deployment.max_num_seqs, cell.deployment.pool_tokens) == (3, 640)
    # The first three, ten steps of the base SLO apart.
    assert [r.arrival_s for r in cell.workload.trace] == pytest.approx(
        [0, 10 * base_s, 20 * base_s]
    )
    assert cell.rate_per_s == pytest.approx(1 / (10 * base_s))


def test_a_table_has_means_over_seeds() -> None:
    points = [point for point in figures(SIZE)["14c"] if point.cell.label.endswith("longest")]
    found = [(point, result(tbt=share)) for point, share in zip(points, (0.4, 0.6), strict=True)]
    one = Shows(
        title="t",
        x_label="x",
        columns=[("tbt", "TBT", "{:.2f}".format)],
        counting=Counting(),
        points=found,
    )

    assert one.rows() == [["pause the longest", "1", "0", "0.50"]]
    assert "| pause the longest | 1 | 0 | 0.50 |" in one.markdown()


def test_a_table_has_no_column_that_says_nothing() -> None:
    """Neither an x that is the same for all, nor SLO scales where there are no SLOs."""
    sized = tokenflow.figures(SIZE)["4090 (a)"][0]
    scaled = figures(SIZE)["14c"][0]
    columns = [("tbt", "TBT", str)]

    def heads(point) -> list[str]:
        one = Shows(
            title="t",
            x_label=NO_AXIS,
            columns=columns,
            counting=Counting(),
            points=[(point, result())],
        )
        assert all(len(row) == len(one.heads) for row in one.rows())
        return one.heads

    assert heads(sized) == ["policy", "TBT"]
    assert heads(scaled) == ["policy", "SLO x", "TBT"]


def test_a_table_says_its_lambda() -> None:
    points = figures(SIZE)["14c"][:2]
    found = [(points[0], result()), (points[1], result(**{"lambda": 0.125}))]
    columns = [("tbt", "TBT", str)]
    one = Shows(title="t", x_label=NO_AXIS, columns=columns, counting=Counting(), points=found)

    assert one.ratios == "lambda 5 to 12 %"
    assert one.ratios in one.markdown()
    assert one.ratios in section(one).body
    assert replace(one, points=found[:1]).ratios == "lambda 5 %"


def test_a_table_says_what_counts_as_in_the_paper_and_what_does_not() -> None:
    columns = [(name, name.upper(), str) for name in ("tbt", "qos", "ttft_s", "stall")]
    counting = Counting(theirs=frozenset({"qos"}), alike=frozenset({"ttft_s"}))
    found = [(figures(SIZE)["14c"][0], result())]
    one = Shows(title="t", x_label=NO_AXIS, columns=columns, counting=counting, points=found)

    said = "As the paper counts: QOS. As this project counts: TBT, STALL. Both alike: TTFT_S."
    assert said in one.markdown()
    assert said in section(one).body


@pytest.mark.parametrize("paper", [orbitflow, tokenflow, layerkv, ellm])
def test_what_counts_as_in_the_paper_is_shown(paper) -> None:
    wanted = paper.figures(paper.FULL)
    found = {name: [(point, result()) for point in points] for name, points in wanted.items()}
    shown = {name for one in paper.shows(found) for name, _, _ in one.columns}

    assert paper.COUNTING.theirs | paper.COUNTING.alike < shown


def test_every_figure_has_a_table_and_those_with_an_axis_charts() -> None:
    found = {name: [(p, result()) for p in points] for name, points in figures(SIZE).items()}
    made = shows(found)
    bodies = {one.title: section(one).body for one in made}

    assert [title.split(":")[0] for title in bodies] == [
        "Fig. 8", "Fig. 9", "Fig. 10", "Fig. 11", "Fig. 12a", "Fig. 12b", "Fig. 13", "Fig. 14a",
        "Fig. 14c", "Section 5.4",
    ]  # fmt: skip
    assert bodies["Fig. 8: SLO attainment, P95 and E2E"].count('class="chart"') == 3 * 3
    assert bodies["Fig. 14a: components"].count('class="chart"') == 3
    assert 'class="chart"' not in bodies["Fig. 14c: whom to pause"]


@pytest.mark.parametrize("paper", [tokenflow, layerkv, ellm])
def test_the_other_papers_figures_have_tables_and_charts_where_there_is_an_axis(paper) -> None:
    wanted = paper.figures(paper.FULL)
    found = {name: [(point, result()) for point in points] for name, points in wanted.items()}
    made = paper.shows(found)

    assert len(made) == len(wanted)
    for one in made:
        charts = section(one).body.count('class="chart"')
        assert charts == len(one.charts) + (0 if one.x_label == "-" else len(paper.DRAWN))
    assert {point.cell.name for points in wanted.values() for point in points} >= {"evenflow"}


def test_what_a_paper_says_stands_beside_what_its_figures_say_here() -> None:
    points = tokenflow.figures(tokenflow.QUICK)["4090 (c)"]
    by_policy = {"sglang": 200.0, "tokenflow": 300.0, "evenflow": 150.0}
    found = {
        name: [
            (point, result(effective_tokens_per_s=by_policy.get(point.cell.name, 1.0)))
            for point in points
        ]
        for name in ("4090 (c)", "4090 (d)")
    }

    # Rows of figures that were not simulated are left out.
    assert claims(found, CLAIMS["tokenflow"]).rows == [
        ["Fig. 17, 4090", "effective throughput +82.5 %", "tokenflow +50 %; evenflow -25 %"]
    ]


def test_ellm_stands_beside_its_own_baselines_load_by_load() -> None:
    rates = {"vllm-recompute": 100.0, "vllm-swap": 50.0, "hcache": 200.0, "ellm": 100.0}
    met = {"ellm": {0.5: 0.95, 0.8: 0.9, 1.2: 0.89}, "hcache": {0.5: 0.9}}

    def found(figure: str) -> Found:
        return {
            figure: [
                (
                    point,
                    result(
                        tokens_per_s=rates.get(point.cell.name, 150.0 + point.x),
                        ttft_s=2.0,
                        tpot=met.get(point.cell.name, {}).get(point.x, 0.5),
                    ),
                )
                for point in ellm.figures(ellm.FULL)[figure]
            ]
        }

    rows = {
        (row[0], row[1][:3]): row[2] for row in claims(found("70B, L-Eval"), CLAIMS["ellm"]).rows
    }
    assert rows["Fig. 12a", "L-E"] == (
        "ellm 1.00, 2.00, 0.50; evenflow 1.50 to 1.52, 3.01 to 3.04, 0.75 to 0.76"
    )
    assert rows["Fig. 15", "70B"] == (
        "vllm-recompute none; vllm-swap none; hcache 0.5; ellm 0.8; evenflow none"
    )
    (row,) = [r for r in claims(found("70B, ShareGPT"), CLAIMS["ellm"]).rows if r[0] == "Fig. 11"]
    assert row[2].startswith("load 2: vllm-recompute 3; ")
    assert row[2].endswith("ellm 6; evenflow 6")


def test_more_requests_come_than_a_pool_holds() -> None:
    by_figure = {name: points[0].cell for name, points in ellm.figures(ellm.FULL).items()}

    sizes = {name: cell.workload.num_requests for name, cell in by_figure.items()}
    assert sizes == {"13B, ShareGPT": 200, "70B, ShareGPT": 2 * 511, "70B, L-Eval": 200}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_can_be_read_from_the_whole_figures(paper) -> None:
    module = PAPERS[paper]
    wanted = module.figures(module.FULL)
    names = {name for one in CLAIMS[paper] for name in one.figures}
    said = {name for shown in module.shows(_all_alike(wanted)) for name, _, _ in shown.columns}
    said |= set(", ".join(DEFINITIONS).split(", "))

    assert names <= wanted.keys()
    assert len(claims(_all_alike(wanted, said), CLAIMS[paper]).rows) == len(CLAIMS[paper])


def _all_alike(wanted, names=()) -> Found:
    return {
        name: [(point, result(**dict.fromkeys(names, 0.5))) for point in points]
        for name, points in wanted.items()
    }


def test_weights_and_kv_fill_the_share_of_the_h200_that_the_paper_gives_them() -> None:
    given = tokenflow.deployment("h200")
    shape = given.shape()
    kv_bytes = given.pool_tokens * shape.block_bytes / shape.block_size

    assert 2 * given.model.num_parameters + kv_bytes == pytest.approx(0.3 * 141e9, rel=1e-3)


def test_readers_of_a_mixed_burst_state_their_own_rates() -> None:
    (cell, *_) = [point.cell for point in tokenflow.figures(tokenflow.QUICK)["19"]]
    rates = [1.0 / one.level.slo_tbt_s for one in cell.requests()]

    assert len(rates) == 80
    assert rates.count(15.0) == pytest.approx(0.4 * len(rates))
    assert rates.count(20.0) == pytest.approx(0.6 * len(rates))


def test_figures_of_each_rate_are_of_its_readers_only() -> None:
    (cell, *_) = [point.cell for point in tokenflow.figures(tokenflow.QUICK)["19"]]
    few = replace(cell.workload, num_requests=5, arrivals=Arrivals())
    run = replace(cell, workload=few, rates_tps=(1.0, 1e4)).run()

    # Nobody generates 10,000 tokens per second for one reader.
    assert run.figures["tpot_deposit at 1/s"] == 1.0
    assert run.figures["tpot_deposit at 10000/s"] == 0.0
    assert len(run.view["timelines"]) == 5


def test_a_burst_arrives_at_once_and_is_as_large_as_table_1_says() -> None:
    (cell, *_) = [point.cell for point in tokenflow.figures(tokenflow.QUICK)["4090 (b)"]]
    requests = cell.workload.requests(rate_per_s=cell.rate_per_s, seed=1, level=ServiceLevel())

    assert len(requests) == 80
    assert {request.arrival_s for request in requests} == {0.0}


def test_speed_is_of_the_runs_own_cpu_time() -> None:
    _, rows = speed({"vllm": [result(), result()]})

    # 2 runs of 2 s, 20 events, 16 steps, 40 tokens.
    assert rows == [["vllm", "2", "4", "5", "4", "10"]]


def tiny_figures() -> dict[str, list[Point]]:
    """Return two figures of a cell each: one's requests are ten times as long as the other's."""
    return {
        name: [
            Point(
                x=1.0,
                cell=Cell(
                    deployment=deployment(),
                    workload=Workload(
                        lengths=(constant_length(num_tokens), constant_length(8)), num_requests=3
                    ),
                    policy="vllm",
                    rate_per_s=1.0,
                    slo_tbt_s=0.1,
                ),
            )
        ]
        for name, num_tokens in (("short", 100), ("long", 1_000))
    }


def tiny_shows(found: Found) -> list[Shows]:
    columns = [("tbt", "TBT", str)]
    return [
        Shows(
            title=f"Table {name}",
            x_label=NO_AXIS,
            columns=columns,
            counting=Counting(),
            points=points,
        )
        for name, points in found.items()
    ]


class CutOffError(Exception):
    """The end of a run, in its midst."""


def test_a_paper_that_was_cut_off_computes_only_what_is_left(tmp_path, monkeypatch) -> None:
    computed: list[int] = []  # by the length of prompts
    run_alike, num_before_the_cut = sweep.run_alike, 1

    def run(cells: Sequence[Cell]) -> list[CellResult]:
        if len(computed) == num_before_the_cut:
            raise CutOffError
        computed.append(cells[0].requests()[0].num_prompt_tokens)
        return run_alike(cells)

    monkeypatch.setattr(sweep, "run_alike", run)
    with pytest.raises(CutOffError):
        _run(tiny_figures(), 1, tmp_path)
    assert computed == [100]

    num_before_the_cut = 2
    found = _run(tiny_figures(), 1, tmp_path)
    assert computed == [100, 1_000]

    # What was kept is what a run from nothing gives, and nothing is left to compute.
    assert _run(tiny_figures(), 1, tmp_path) == found
    assert computed == [100, 1_000]
    num_before_the_cut = 4
    anew = _run(tiny_figures(), 1, tmp_path / "anew")
    assert _figures_of(anew) == _figures_of(found)
    assert len(computed) == 4


def _figures_of(found: Found) -> dict[str, list[dict[str, float]]]:
    return {name: [result.figures for _, result in points] for name, points in found.items()}


def test_every_table_of_a_report_and_every_cell_of_its_json_say_their_lambda(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(PAPERS, "tiny", SimpleNamespace(INTRO="Two cells.", shows=tiny_shows))
    monkeypatch.setitem(CLAIMS, "tiny", ())
    found = _run(tiny_figures(), 1, tmp_path / "runs")

    how = {"quick": True, "seeds": 1, "wall_s": 1.0, **circumstances(os.getloadavg())}
    _write("tiny", found, tmp_path, how)

    short, long = (f"{one.ratios}. " for one in tiny_shows(found))
    assert short != long
    for name in ("tiny.html", "tiny.md"):
        text = (tmp_path / name).read_text()
        assert f"commit {how['commit']}" in text
        before, _, behind = text.rpartition("Table long")
        assert (short in before, long in before) == (True, False)
        assert (short in behind, long in behind) == (False, True)
    rows = json.loads((tmp_path / "tiny.json").read_text())["figures"]
    for title, ((_, cell),) in found.items():
        (row,) = rows[title]
        assert row["lambda"] == cell.figures["lambda"] > 0.0
