"""Policies by name: the stack's own, anybody's by module, and what they leave to a request."""

import pytest

from lab.planning.snapshots import make_snapshot
from lab.policies.presets import full_name, short_name
from services.placement.presets import OPTIMISER, PRESETS, preset_of, resolved
from services.placement.types import VictimRule
from tests.policies import EVERY


def test_every_policy_is_found_by_its_full_name_and_its_short_one() -> None:
    for name, preset in EVERY.items():
        assert preset_of(name) is preset
        assert full_name(short_name(name)) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gurobi", "neither one of vllm, evenflow, orbitflow, .* nor module:attribute"),
        ("", "neither one of"),
        (":SGLANG", "neither one of"),
        ("lab.policies.presets:", "neither one of"),
        ("..presets:SGLANG", "neither one of"),
        ("nowhere.at.all:X", "cannot be loaded: No module named 'nowhere'"),
        ("lab.policies.presets:NOWHERE", "cannot be loaded: .* no attribute 'NOWHERE'"),
        ("lab.policies.presets:full_name", "is a function, not a Preset"),
    ],
)
def test_a_name_that_stands_for_no_policy_is_refused_in_a_sentence(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        preset_of(name)


def test_the_ablations_add_one_component_each() -> None:
    names = ("batch-uniform", "request-wise", "request-wise-pause", "orbitflow")
    chosen = [preset_of(full_name(name)) for name in names]

    assert [preset.placing is OPTIMISER for preset in chosen] == [False, True, True, True]
    assert [preset.pause for preset in chosen] == [False, False, True, True]
    assert [preset.deposit for preset in chosen] == [False, False, False, True]


def test_an_open_parameter_takes_the_presets_value_and_a_given_one_stays() -> None:
    _, open_ = resolved(make_snapshot(policy="orbitflow"))
    _, given = resolved(
        make_snapshot(
            policy="orbitflow", deposit=False, pause=False, victim_rule=VictimRule.SHORTEST
        )
    )

    assert open_.parameters.victim_rule is VictimRule.KV_AND_DEPOSIT
    assert (open_.parameters.deposit, open_.parameters.pause) == (True, True)
    assert given.parameters.victim_rule is VictimRule.SHORTEST
    assert (given.parameters.deposit, given.parameters.pause) == (False, False)


def test_where_a_run_policy_decides_no_plan_pauses_for_an_slo() -> None:
    assert all(not preset.pause for preset in PRESETS.values() if preset.run is not None)
