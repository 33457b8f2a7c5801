"""A benchmark's table in a page of results: between its markers, and nowhere else."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.document import Benchmark, around_table, circumstances, measure_named, write_table
from bench.failover.__main__ import BENCHMARKS as FAILOVER
from bench.planner.__main__ import PARTS

ROOT = Path(__file__).parents[3]
PAGE = """# Results

<!-- table first -->
By hand.

| a |
|---|
| 1 |
<!-- end -->

Between them.

<!-- table second -->
<!-- end -->

Behind them.
"""
CONTENT = {
    "command": "python -m bench.some --page p.md",
    "commit": "1234567 with changes",
    "date": "2030-01-02",
    "machine": {
        "cpu": "Some CPU",
        "num_cpus": 2,
        "python": "3.11.7",
        "load_before": (0.25, 0, 0),
        "load_after": (1.0, 0, 0),
    },
}
TABLE = [["n", "ms"], ["1", "2.5"]]
WRITTEN = """\
`python -m bench.some --page p.md`, commit 1234567 with changes, 2030-01-02, Some CPU, 2 cores, \
Python 3.11.7, 1-minute load 0.2 before and 1.0 after.

| n | ms |
|---|---|
| 1 | 2.5 |
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "p.md"
    path.write_text(PAGE)
    return path


def test_a_table_replaces_what_its_markers_enclose_and_nothing_else(page: Path) -> None:
    write_table(page, "first", CONTENT, TABLE)

    assert page.read_text() == PAGE.replace("By hand.\n\n| a |\n|---|\n| 1 |\n", WRITTEN)


def test_a_table_written_again_stands_there_once(page: Path) -> None:
    for _ in range(2):
        write_table(page, "second", CONTENT, TABLE)

    assert page.read_text() == PAGE.replace("second -->\n", f"second -->\n{WRITTEN}")


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        ("<!-- table first -->", "first"),
        ("| 1 |\n<!-- end -->", "first"),  # the second's end is not the first's
        ("<!-- end -->\n\nBehind", "second"),
    ],
)
def test_a_page_without_a_marker_is_refused_by_name_and_stays(
    page: Path, lost: str, name: str
) -> None:
    text = PAGE.replace(lost, "")
    page.write_text(text)

    with pytest.raises(LookupError, match=rf"p\.md has no table between <!-- table {name} -->"):
        write_table(page, name, CONTENT, TABLE)
    assert page.read_text() == text


def benchmark(name: str, measured: list[str]) -> Benchmark:
    def measure() -> list[dict[str, int]]:
        measured.append(name)
        return [{"n": 7}]

    def table(rows: object) -> list[list[str]]:
        return [["n"], *([f"{row['n']}"] for row in rows)]  # type: ignore[attr-defined]

    return Benchmark(name=name, title=name, definitions={}, measure=measure, table=table)


def run(names: list[str], page: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a benchmark module's command line; returns what was measured."""
    measured: list[str] = []
    out = ["--out", str(page.parent), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["bench.some", *names, *out])
    benchmarks = {name: lambda name=name: benchmark(name, measured) for name in ("first", "third")}
    measure_named(benchmarks, prefix="some", description=None)  # type: ignore[arg-type]
    return measured


def test_a_benchmark_writes_the_rows_that_it_prints(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["first"], page, monkeypatch) == ["first"]

    _, _, behind = page.read_text().partition("<!-- table first -->\n")
    written, _, _ = behind.partition("<!-- end -->")
    assert "| n |\n|---|\n| 7 |\n" in written
    assert written in capsys.readouterr().out


def test_a_page_without_a_benchmark_s_markers_is_refused_before_anything_is_measured(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run([], page, monkeypatch)

    assert "<!-- table third -->" in capsys.readouterr().err
    assert page.read_text() == PAGE
    assert not list(page.parent.glob("*.json"))


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("results/planner.md", PARTS),
        ("failures.md", [one.name for one in FAILOVER]),
        ("gateway.md", ["streams", "tracker", "vllm"]),
        ("fleet.md", ["routing"]),
    ],
)
def test_a_page_has_a_place_for_each_of_its_tables(page: str, names: Sequence[str]) -> None:
    for name in names:
        around_table(ROOT / "docs" / page, name)


def test_a_commit_with_changes_to_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    files = [tmp_path / "docs/page.md", tmp_path / "code.py"]
    for path in files:
        path.write_text("before")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--no-verify", "--message", "first")
    said = []
    for path in files:
        path.write_text("now")
        said.append(circumstances((0.0, 0.0, 0.0))["commit"])

    commit = said[0]
    assert commit.isalnum()
    assert said == [commit, f"{commit} with changes"]  # the page, written by a run, and the code
