"""Figures of runs on the engine, counted as those of simulated runs are. Pure, but for files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.document import Row as Figures
from bench.e2e.reading.rows import Row
from bench.e2e.records import RequestRecord, requests_of
from bench.e2e.systems import is_resident
from bench.who_runs import __main__ as who_runs
from bench.who_runs.reading import figures_by_kind
from services.placement.types import RequestId
from simulator.engine.records import Outcome, RunRecord, Totals
from simulator.report.figures import figures

STOCK = "vllm"  # whose tokens are compared with
NOT_MEASURED = ("cached", "refused")  # columns of simulated runs: nothing is cached or refused here
PARKS = "kv_num_parks"  # of the executor's metrics
DEFINITIONS = {
    name: who_runs.DEFINITIONS[name]
    for name in ("lambda", "tokens/s", "in time", "TPOT", "effective, QoS, rebuffering")
} | {
    "TTFT": "from the submit to the first token, in seconds; means over seeds",
    "vllm@0.02": "stock vLLM with `watermark` 0.02, on the same device, and as `evenflow` without "
    "a prefix cache; it uses no link, so that its runs stand beside every lambda",
    "people, agents": who_runs.DEFINITIONS["people, agents"],
    "parks": "requests that left the pool to make room, per run",
    "other tokens": f"requests whose tokens are not those that `{STOCK}` gave the same request, "
    "over all seeds; greedy, in whatever batches they were computed",
    "failed": "requests that did not get all of their answer, over all seeds; not in the figures",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Which run this is."""

    row: Row
    system: str
    seed: int
    link_frac: float = 0.0  # lambda; 0: the system uses no link

    @property
    def name(self) -> str:
        link = f"-{100 * self.link_frac:g}%" if self.link_frac else ""
        return f"{self.row}-{self.system}{link}-s{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system on one row's requests."""

    key: RunKey
    requests: tuple[RequestRecord, ...]
    sums: dict[str, float]  # of the executor's metrics, over the run
    started: str = ""  # UTC
    load: float = 0.0  # of the machine when the run ended


def save(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(run)))


def load(path: Path) -> Run:
    data = json.loads(path.read_text())
    key = RunKey(**data["key"] | {"row": Row(data["key"]["row"])})
    return Run(**data | {"key": key, "requests": requests_of(data["requests"])})


def rows_of(runs: Sequence[Run]) -> list[Figures]:
    """Return a row of the seeds' means for each way of arriving, lambda and system."""
    rows = []
    for row in Row:
        here = [run for run in runs if run.key.row is row]
        for link_frac in sorted({run.key.link_frac for run in here if run.key.link_frac}):
            beside = [run for run in here if run.key.link_frac in (0.0, link_frac)]
            for system in dict.fromkeys(run.key.system for run in beside):
                members = [run for run in beside if run.key.system == system]
                mean = who_runs.mean_of([_figures(run, link_frac) for run in members])
                counts = {
                    "other_tokens": sum(num_others(run, here) for run in members),
                    "failed": sum(bool(r.failure) for run in members for r in run.requests),
                }
                rows.append(mean | counts)
    return rows


def _figures(run: Run, link_frac: float) -> Figures:
    """Return one run's figures, beside such a link."""
    outcomes = tuple(map(outcome_of, (r for r in run.requests if not r.failure)))
    end_s = max((one.generated_s[-1] for one in outcomes), default=0.0)
    record = RunRecord(outcomes=outcomes, totals=Totals(), num_events=0, end_s=end_s)
    return {
        "regime": str(run.key.row),
        "policy": run.key.system,
        "seed": run.key.seed,
        "lambda": link_frac,
        "parks": 0.0 if is_resident(run.key.system) else run.sums.get(PARKS, 0.0),
        **figures(record),
        **figures_by_kind(outcomes),
    }


def outcome_of(request: RequestRecord) -> Outcome:
    """Return a request as the simulator has it at its end."""
    return Outcome(
        request_id=RequestId(request.request_id),
        arrival_s=request.submitted_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        level=request.level,
        generated_s=request.generated_s,
    )


def num_others(run: Run, runs: Sequence[Run]) -> int:
    """Return how many requests have other tokens than stock vLLM gives them; 0 without its run."""
    stock = {
        request.request_id: request.token_ids
        for one in runs
        if one.key == replace(run.key, system=STOCK, link_frac=0.0)
        for request in one.requests
        if not request.failure
    }
    return sum(
        request.token_ids != stock.get(request.request_id, request.token_ids)
        for request in run.requests
        if not request.failure
    )


def verdicts(rows: Sequence[Figures]) -> list[str]:
    """Return a line for each way of arriving and lambda: `evenflow` beside vLLM's best setting."""
    lines = []
    for link_frac in sorted({row["lambda"] for row in rows}):
        beside = [row for row in rows if row["lambda"] == link_frac]
        lines += [f"lambda {link_frac:.0%}, {line}" for line in who_runs.verdicts(beside)]
    return lines


def table(rows: Sequence[Figures]) -> list[list[str]]:
    """Return the rows' cells below their columns."""
    header, *lines = who_runs.table(rows)
    places = [place for place, column in enumerate(header) if column not in NOT_MEASURED]
    return [
        [*(header[place] for place in places), "other tokens", "failed"],
        *(
            [*(line[place] for place in places), str(row["other_tokens"]), str(row["failed"])]
            for line, row in zip(lines, rows, strict=True)
        ),
    ]
