"""What a report shows."""

import random
import re
from types import SimpleNamespace

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.engine.records import Outcome
from simulator.engine.residency import MAX_SAMPLES, ResidencyLog
from simulator.report.charts import COLOURS, Chart, Line, draw, line_chart, svg
from simulator.report.figures import step_promptness
from simulator.report.page import table
from simulator.report.plots import Run, deposit, goodput
from simulator.report.views import MAX_POINTS, NUM_QUANTILES, quantiles, telling, thinned, timeline


def make_outcome(**overrides) -> Outcome:
    given = {
        "request_id": RequestId("a"),
        "arrival_s": 0.0,
        "num_prompt_tokens": 5,
        "num_output_tokens": 4,
        "level": ServiceLevel(slo_tbt_s=1.0),
        "generated_s": (1.0, 1.5, 2.0, 6.0),
    }
    return Outcome(**(given | overrides))


def run_at(rate: float, attained: float, policy: str = "p") -> Run:
    row = {"policy": policy, "rate_per_s": rate, "slo_tbt_s": 0.1, "tbt_deposit": attained}
    return Run(row=row, view={})


def test_quantiles_span_all_values() -> None:
    found = quantiles(list(range(1_000)))

    assert (found[0], found[NUM_QUANTILES // 2], found[-1]) == (0, 500, 999)
    assert quantiles([]) == []


def test_thinned_curves_keep_their_ends() -> None:
    kept = thinned(range(10_000))

    assert (len(kept), kept[0], kept[-1]) == (MAX_POINTS, 0, 9_999)
    assert thinned([1, 2, 3]) == [1, 2, 3]


def test_the_deposit_is_what_is_generated_and_not_delivered() -> None:
    # Generated at 1, 1.5, 2, 6; due at 1, 2, 3, 6.
    given = timeline(make_outcome())
    generated = list(zip(given["generated_s"], given["token"], strict=True))
    delivered = list(zip(given["delivered_s"], given["token"], strict=True))

    assert deposit(generated, delivered) == [(1.0, 0), (1.5, 1), (2.0, 1), (3.0, 0), (6.0, 0)]


def test_the_request_to_which_most_happened_is_shown() -> None:
    calm, paused = make_outcome(), make_outcome(pauses_s=((2.0, 5.0),), generated_s=(1.0, 1.5))

    assert max([calm, paused], key=telling) is paused
    assert timeline(paused)["pauses_s"] == [[2.0, 5.0]]


def test_goodput_is_the_highest_rate_that_is_held() -> None:
    runs = [run_at(1.0, 0.99), run_at(2.0, 0.9), run_at(3.0, 0.89), run_at(1.0, 0.2, "q")]

    assert goodput(runs) == {("p", 0.1): 2.0, ("q", 0.1): 0.0}


def test_a_chart_of_one_point_or_of_none_is_drawn() -> None:
    one = Line(name="a<b", points=[(2.0, 5.0)], marked=True)
    for lines in ([one], [Line(name="x", points=[])], []):
        specification = line_chart(Chart(title="t", x_label="x", y_label="y", lines=lines))
        drawn = svg(specification)
        assert drawn.startswith("<svg")
        assert "NaN" not in drawn
        assert "a<b" not in drawn + draw(specification)


def test_lines_keep_their_colour_whatever_else_is_drawn() -> None:
    lines = [
        Line(name="first", points=[(0.0, 1.0), (1.0, 2.0)], colour=3),
        Line(name="second", points=[(0.0, 2.0), (1.0, 1.0)], colour=1, dashed=True),
    ]
    drawn = svg(line_chart(Chart(title="t", x_label="x", y_label="y", lines=lines)))

    assert drawn.count(f'stroke="{COLOURS[3]}"') >= 1
    assert re.search(rf'stroke="{COLOURS[1]}"[^>]*stroke-dasharray="4,3"', drawn)


def test_what_is_beyond_the_ends_of_an_axis_does_not_move_them() -> None:
    line = Line(name="a", points=[(0.0, 0.0), (1.0, 50.0), (900.0, 60.0)])
    chart = Chart(
        title="t", x_label="x", y_label="y", lines=[line], x_low=0.0, x_high=1.0, y_high=100.0
    )

    assert "900" not in svg(line_chart(chart))


def test_texts_of_tables_are_escaped() -> None:
    assert "<td>&lt;b&gt;</td>" in table(["h"], [["<b>"]])


def test_residency_is_thinned_evenly() -> None:
    log, rng, now_s = ResidencyLog(), random.Random(0), 0.0
    for _ in range(20_000):
        now_s += rng.uniform(0.5, 1.5)
        log.add(SimpleNamespace(time_s=now_s, num_running=1))
        assert len(log.samples) <= MAX_SAMPLES
    gaps = [b.time_s - a.time_s for a, b in zip(log.samples, log.samples[1:], strict=False)]

    assert len(log.samples) >= MAX_SAMPLES // 4
    assert max(gaps) <= 2 * min(gaps) + 3


def test_the_artefacts_figures_know_only_decode_steps() -> None:
    # Steps of 0.5, 0.5, 1.8 s on their own clock: 0, 0.5, 1, 2.8; due 0, 1, 2, 3: all in time with
    # a deposit, one too long without. The engine's gap of 4 s before the last token is not seen.
    one = step_promptness(make_outcome(decode_steps_s=(0.5, 0.5, 1.8)))

    assert one is not None
    assert (one.num_steps, one.num_in_time, one.num_in_time_deposit) == (3, 2, 3)
    assert one.tpot_met


def test_the_artefacts_figures_have_no_tolerance() -> None:
    one = step_promptness(make_outcome(decode_steps_s=(1.001,)))

    assert one is not None
    assert (one.num_in_time, one.num_in_time_deposit, one.tpot_met) == (0, 0, False)
