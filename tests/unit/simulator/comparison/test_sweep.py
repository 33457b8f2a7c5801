"""Sweeps: parallel, cached, resumable."""

from dataclasses import replace

import pytest

from services.placement.types import PolicyParameters, VictimRule
from simulator.comparison.cache import CellCache, cell_key
from simulator.comparison.grid import Cell, Workload
from simulator.comparison.sweep import sweep
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device, model
from simulator.workload import constant_length
from tests.policies import EVERY


def make_cell(**overrides) -> Cell:
    deployment = Deployment(
        model=model("llama-3-8b"),
        device=device("a5000"),
        assumptions=assumptions(),
        pool_tokens=512,
    )
    workload = Workload(lengths=(constant_length(40), constant_length(10)), num_requests=4)
    given = {"policy": "vllm", "workload": workload, "rate_per_s": 1.0, "slo_tbt_s": 0.05}
    return Cell(deployment=deployment, **(given | overrides))


def test_answers_depend_neither_on_the_number_of_processes_nor_on_the_cache(tmp_path) -> None:
    cells, cache = [make_cell(rate_per_s=r) for r in (1.0, 5.0)], CellCache(tmp_path)
    alone = sweep(cells)
    parallel = sweep(cells, jobs=2, cache=cache)
    cached = sweep(cells, cache=cache)

    rows = [
        [(cell.row(result), result.view) for cell, result in zip(cells, results, strict=True)]
        for results in (alone, parallel, cached)
    ]
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("policy", [name for name, one in EVERY.items() if one.is_slo_blind])
def test_one_run_serves_every_slo_that_a_policy_does_not_look_at(policy) -> None:
    crowded = Workload(lengths=(constant_length(160), constant_length(40)), num_requests=12)
    cells = [
        make_cell(policy=policy, workload=crowded, rate_per_s=9.0, slo_tbt_s=slo_s)
        for slo_s in (0.01, 0.03, 0.2)
    ]
    together, alone = sweep(cells), [cell.run() for cell in cells]

    assert len({cell_key(cell.asked) for cell in cells}) == 1
    assert [one.figures for one in together] == [one.figures for one in alone]
    assert [one.view for one in together] == [one.view for one in alone]
    assert len({one.figures["tbt"] for one in alone}) > 1
    assert sum(one.figures["preemptions"] for one in alone) > 0 or policy != "vllm"


def test_a_policy_that_looks_at_slos_runs_at_each() -> None:
    cells = [make_cell(policy="orbitflow", slo_tbt_s=slo_s) for slo_s in (0.01, 0.2)]

    assert len({cell_key(cell.asked) for cell in cells}) == len(cells)


def test_a_sweep_that_was_cut_off_goes_on(tmp_path) -> None:
    cells, cache = [make_cell(rate_per_s=r) for r in (1.0, 2.0, 3.0)], CellCache(tmp_path)

    def cut_off(cell: Cell, cached: bool) -> None:
        if cell.rate_per_s == 2.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cells, cache=cache, finished=cut_off)
    seen: list[tuple[float, bool]] = []
    sweep(cells, cache=cache, finished=lambda cell, cached: seen.append((cell.rate_per_s, cached)))

    assert seen == [(1.0, True), (2.0, True), (3.0, False)]


def test_a_damaged_file_is_run_again(tmp_path) -> None:
    cell, cache = make_cell(), CellCache(tmp_path)
    (result,) = sweep([cell], cache=cache)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-20])

    (again,) = sweep([cell], cache=cache)

    assert again.figures == result.figures
    assert cache.get(cell) == again


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"policy": "orbitflow"},
        {"slo_tbt_s": 0.06},
        {"parameters": PolicyParameters(victim_rule=VictimRule.SHORTEST)},
        {"workload": Workload(lengths=(constant_length(41), constant_length(10)))},
    ],
)
def test_every_input_names_the_file(change) -> None:
    assert cell_key(replace(make_cell(), **change)) != cell_key(make_cell())


def test_a_label_is_no_input() -> None:
    assert cell_key(make_cell(label="another name")) == cell_key(make_cell())
