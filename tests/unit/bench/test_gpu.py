"""The GPU benchmark: its cells on streams in memory, and runs that end early and go on."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import gmtime as real_gmtime
from typing import Any

import pytest

from bench.gpu.__main__ import main, read, run_all, run_cell
from bench.gpu.cell import run
from bench.gpu.cells import DEVICE_PARTS, PARTS, Cell, device_cells, engine_cells
from bench.gpu.tables import print_tables

CELLS = {cell.id: cell for cell in device_cells("cpu")}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Run one cell: what it imports and compiles is no test's own time."""
    run(next(iter(CELLS.values())))


def rows_of(cell_id: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run(CELLS[cell_id])["rows"]
    return rows


@pytest.mark.parametrize("cell_id", [name for name in CELLS if name.startswith("order/")])
def test_layers_read_what_they_should_and_what_is_left_out_is_found(cell_id: str) -> None:
    (row,) = rows_of(cell_id)

    assert row["num_loads"] >= 2 * 2  # of the first step alone: every other layer
    assert row["num_checked"] == 40 * 2 * 4 * 2  # steps, requests, layers, blocks
    assert (row["num_wrong"] > 0) == bool(row["broken"])
    assert row["as_it_should"]


@pytest.mark.parametrize("cell_id", [name for name in CELLS if name.startswith("link/")])
def test_the_engine_is_as_fast_as_one_plain_copy_where_nothing_costs_but_bytes(
    cell_id: str,
) -> None:
    for row in rows_of(cell_id):
        assert row["h2d_share"] == pytest.approx(1.0)
        assert row["d2h_share"] == pytest.approx(1.0)
        assert row["both_bytes_per_s"] == pytest.approx(2 * row["plain_h2d_bytes_per_s"])


@pytest.mark.parametrize("cell_id", [name for name in CELLS if name.startswith("overlap/")])
def test_steps_take_their_longest_path_where_nothing_costs_but_layers_and_bytes(
    cell_id: str,
) -> None:
    (row,) = rows_of(cell_id)

    assert row["ratio"] == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    "cell_id", [n for n in CELLS if not n.startswith(("order/", "link/", "overlap/"))]
)
def test_the_other_cells_run(cell_id: str) -> None:
    for row in rows_of(cell_id):
        assert all(value is not None for value in row.values())
        assert not row.get("error")


def test_the_device_part_needs_nothing_of_vllm() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from bench.gpu.cell import run; from bench.gpu.cells import device_cells\n"
        "assert run(device_cells('cpu')[0])['rows'][0]['as_it_should']\n"
        "assert not [name for name in sys.modules if name.startswith('vllm.')]"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_part_has_cells_and_no_two_share_a_name() -> None:
    cells = [*device_cells("cuda"), *engine_cells("cuda", "model")]

    assert len({cell.id for cell in cells}) == len(cells)
    assert {cell.part for cell in cells} == set(PARTS)
    assert {cell.part for cell in device_cells("cpu")} == set(DEVICE_PARTS)
    assert json.loads(json.dumps(cells[0].as_json())) is not None


def options(tmp_path: Path, **values: Any) -> argparse.Namespace:
    defaults = {"out": tmp_path / "gpu.jsonl", "budget_s": 1e9, "cell_timeout_s": 10.0}
    return argparse.Namespace(**(defaults | values))


def cells_named(*names: str) -> list[Cell]:
    return [Cell(part="order", name=name, device="cpu") for name in names]


def test_each_cell_leaves_a_line_whatever_becomes_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("bench.gpu.__main__.time.gmtime", lambda: real_gmtime(clock[0]))

    def run_one(cell: Cell, timeout_s: float) -> dict[str, Any]:
        assert timeout_s == 10.0
        clock[0] += 60.0
        return {"error": "no device"} if cell.name == "b" else {"device": "d", "rows": [{"x": 1}]}

    left = run_all(cells_named("a", "b", "c"), options(tmp_path), "c0ffee", run_one)

    assert left == 0
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["cell"] for line in lines] == ["order/a", "order/b", "order/c"]
    assert [line["started"][-10:] for line in lines] == [f"T00:0{n}:00Z" for n in range(3)]
    assert read(tmp_path / "gpu.jsonl", "c0ffee").keys() == {"order/a", "order/c"}
    assert read(tmp_path / "gpu.jsonl", "another") == {}
    print_tables(read(tmp_path / "gpu.jsonl", "c0ffee"))


def test_a_run_ends_with_its_budget_and_says_what_is_left(tmp_path: Path) -> None:
    started = []

    def run_one(cell: Cell, timeout_s: float) -> dict[str, Any]:
        started.append(timeout_s)
        return {"device": "d", "rows": []}

    budget = options(tmp_path, budget_s=6.0, cell_timeout_s=600.0)
    assert run_all(cells_named("a"), budget, "c0ffee", run_one) == 0
    assert 0.0 < started[0] <= 6.0
    spent = options(tmp_path, budget_s=0.0)
    assert run_all(cells_named("a", "b"), spent, "c0ffee", run_one) == 2
    assert len(started) == 1


def test_a_cell_that_takes_too_long_or_dies_is_told_so() -> None:
    (cell,) = cells_named("x")

    assert "not done after" in run_cell(cell, 0.01)["error"]
    unknown = Cell(part="order", name="x", device="cpu", options={"num_steps": "many"})
    assert "ended with 1" in run_cell(unknown, 600.0)["error"]


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--only", "marks/*", "--out", str(tmp_path / "gpu.jsonl")]

    main(arguments)
    first = capsys.readouterr().out
    main(arguments)
    second = capsys.readouterr().out

    assert "1 cells run, 0 left" in first
    assert "0 cells run, 0 left" in second
    assert "cpu_s_per_mark" in second


def test_tokens_are_set_beside_those_of_stock_vllm_run_in_the_same_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def line(tokens: str, broken: str = "") -> dict[str, Any]:
        return {"device": "d", "rows": [{"broken": broken, "tokens": tokens}]}

    print_tables(
        {
            "exactness/stock,breakable=0": line("x"),
            "exactness/stock,breakable=0,fp8": line("y"),
            "exactness/layerwise,breakable=0": line("x"),
            "exactness/layerwise,breakable=0,fp8": line("y"),
            "exactness/layerwise,breakable=0,waits": line("z", "waits"),
            "exactness/groups4,breakable=0,fp8": line("x"),
        }
    )

    *rows, last = capsys.readouterr().out.splitlines()[3:]
    assert [row.split()[-1] for row in rows] == ["True"] * 5
    assert last.split()[-1] == "False"


@pytest.mark.nightly
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    main(["--device", "cpu", "--out", str(tmp_path / "gpu.jsonl"), "--cell-timeout-s", "900"])

    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {line["cell"].partition("/")[0] for line in lines} == set(PARTS)
    assert not [line for line in lines if "error" in line]
    tokens = {
        line["cell"]: line["rows"][0]["tokens"] for line in lines if "exactness" in line["cell"]
    }
    stock = tokens.pop("exactness/stock,breakable=0")
    for cell, digest in tokens.items():
        assert (digest == stock) != cell.endswith(("waits", "slots")), cell
    decoded = [line for line in lines if line["cell"].startswith(("cost/", "engine-overlap/"))]
    assert all(row["step_s"] > 0.0 for line in decoded for row in line["rows"])
    assert [row["placement"] for row in decoded[-1]["rows"]] == ["none", "every:1"]
