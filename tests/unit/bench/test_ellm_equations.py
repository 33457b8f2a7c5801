"""eLLM's equations: what the printed ones answer, and the consistent ones against the simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.ellm_contradictions import ROWS, contradictions
from bench.papers.ellm_equations import (
    Consistent,
    Form,
    Printed,
    chosen,
    grid,
    is_feasible,
    slsqp,
)
from bench.papers.ellm_equations import settings as table_1
from simulator.device.costs import Roofline, StepLoad
from tests.fuzz import examples

SETTINGS = table_1()
names = st.sampled_from(sorted(SETTINGS))


@settings(max_examples=examples(100))
@given(name=names, b=st.integers(1, 512), r=st.floats(0.0, 1.0), more=st.floats(0.0, 1.0))
def test_as_printed_a_token_never_costs_less_for_being_computed_anew_whatever_the_batch(
    name: str, b: int, r: float, more: float
) -> None:
    form = Printed(setting=SETTINGS[name])

    per_token_s = form.step_s(b, r) / b
    assert form.step_s(b, min(1.0, r + more)) / b >= per_token_s
    assert form.step_s(1, r) == pytest.approx(per_token_s)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_printed_optimiser_computes_nothing_anew(name: str) -> None:
    answers = slsqp(SETTINGS[name], Printed(setting=SETTINGS[name]))

    assert answers
    assert max(answer.r for answer in answers) < 1e-6


@pytest.mark.parametrize("name", SETTINGS)
def test_all_solvers_agree_on_the_consistent_form(name: str) -> None:
    setting = SETTINGS[name]
    form: Form = Consistent(setting=setting)

    searched, tried = chosen(setting, form), grid(setting, form)
    best = max(slsqp(setting, form), key=lambda answer: answer.tokens_per_s)
    assert searched is not None
    assert searched == tried
    assert abs(best.b - searched.b) < 1.0
    assert best.r == pytest.approx(searched.r, abs=1e-6)
    assert is_feasible(setting, form, searched.b, searched.r)


@settings(max_examples=examples(50))
@given(name=names, b=st.integers(1, 200), blocks=st.integers(0, 50))
def test_the_consistent_form_is_the_simulators_roofline(name: str, b: int, blocks: int) -> None:
    setting = SETTINGS[name]
    on, s = setting.deployment, setting.num_tokens
    costs = Roofline(
        model=on.model, device=on.device, assumptions=on.assumptions, num_devices=on.num_devices
    )
    load = StepLoad(
        num_decodes=b,
        num_context_tokens=b * (s + 1),
        recomputed=(16 * blocks,) * (b * bool(blocks)),
    )
    step_s = on.model.num_hidden_layers * costs.layer_s(load) + costs.outside_s(load)

    assert Consistent(setting=setting).step_s(b, 16 * blocks / s) == pytest.approx(step_s)


def test_every_place_of_the_paper_has_its_row() -> None:
    table = contradictions(list(ROWS))

    assert [row[0] for row in table.rows] == list(ROWS)
    assert all(len(row) == len(table.heads) and all(row) for row in table.rows)
