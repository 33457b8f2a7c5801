"""`evenflow simulate|size`: what would policy P do with this model, GPU, link and traffic?"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from services.placement.run.reader_capacity import READING_RATE_TPS
from simulator.comparison.cache import CellCache
from simulator.comparison.grid import Arrivals, Cell, CellResult, Workload
from simulator.comparison.sizing import Readers, Trial, in_words, largest_held, room_for
from simulator.comparison.sweep import progress_bar, sweep
from simulator.compose import check, run_policy
from simulator.deployment import Deployment
from simulator.description import describe, guesses
from simulator.device.drafts import Drafts
from simulator.device.hardware import Device, assumptions, link_rates
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.vllm import VllmOptions
from simulator.measured import MeasuredDeployment, read_decision_log
from simulator.memory.room import pool_tokens
from simulator.models.types import Model
from simulator.options import (
    DEFAULT_POLICIES,
    DRAFT_FRAC,
    MEASURED_HELP,
    TRACE_HELP,
    AcceptanceOption,
    BatchedOption,
    CacheOption,
    DeviceFileOption,
    DeviceOption,
    DraftFracOption,
    DraftsOption,
    GpusOption,
    HostOption,
    JsonOption,
    LengthsName,
    LinkName,
    LinkOption,
    ModelOption,
    PoliciesOption,
    PoolOption,
    RatesOption,
    RequestsOption,
    SeqsOption,
)
from simulator.report import figures, steps
from simulator.report.page import definitions, page, sweep_sections
from simulator.report.plots import Run
from simulator.report.tables import print_rows
from simulator.sessions import AgentSessions, draw_sessions
from simulator.traces import read_trace
from simulator.workload import ArrivingRequest, published_lengths

app = typer.Typer(
    help="Policies in virtual time: no GPU needed.", no_args_is_help=True, add_completion=False
)

DEFAULT_RATE_PER_S = 0.1
DEFAULT_NUM_REQUESTS = 60
AGENTS = AgentSessions()
SIMULATED = "simulated, by the assumptions in docs/simulator.md"
DEFINITIONS = {**figures.DEFINITIONS, **steps.DEFINITIONS}


def _drafts(number: int, acceptance: float | None, cost_frac: float) -> Drafts | None:
    """Return what is drafted. Raises typer.BadParameter for a number without its acceptance."""
    if bool(number) != (acceptance is not None):
        raise typer.BadParameter("give --drafts and --acceptance, or neither")
    if acceptance is None:
        return None
    return Drafts(num_drafts=number, acceptance=acceptance, cost_frac=cost_frac)


def _deployment(model: Model, on: Device, **settings: Any) -> Deployment:
    """Return the deployment. Raises typer.BadParameter if the model does not fit."""
    deployment = Deployment(model=model, device=on, assumptions=assumptions(), **settings)
    try:
        deployment.shape()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return deployment


@app.command()
def simulate(
    model: ModelOption = None,
    device: DeviceOption = None,
    device_file: DeviceFileOption = None,
    measured: Annotated[Path | None, typer.Option(help=MEASURED_HELP)] = None,
    policy: PoliciesOption = DEFAULT_POLICIES,
    rate: RatesOption = None,
    slo_scale: Annotated[list[float], typer.Option(help="x base SLO, repeatable")] = [1.5],
    tbt_ms: Annotated[float, typer.Option(min=0, help="TBT SLO instead of a scale")] = 0.0,
    lengths: Annotated[LengthsName, typer.Option(help="data set")] = LengthsName("sharegpt"),
    trace: Annotated[Path | None, typer.Option(help=TRACE_HELP)] = None,
    trace_step_ms: Annotated[float, typer.Option(help="of OrbitFlow's arrival steps")] = 36.0,
    num_requests: RequestsOption = 0,
    cv: Annotated[float, typer.Option(min=0.01, help="of gaps; 1: Poisson")] = 1.0,
    burst: Annotated[int, typer.Option(min=0, help="requests at once instead")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="of a conversation; drawn requests only")] = 1,
    turn_gap_s: Annotated[float, typer.Option(min=0, help="between its messages")] = 60.0,
    sessions: Annotated[
        int, typer.Option(min=0, help="of agents, by published means, instead of --lengths")
    ] = 0,
    session_steps: Annotated[int, typer.Option(min=1, help="of each")] = AGENTS.num_steps,
    session_scale: Annotated[float, typer.Option(min=1e-4, help="of their tokens")] = 1.0,
    branch_frac: Annotated[float, typer.Option(min=0, max=1, help="of steps: branches run")] = 0.0,
    subagent_frac: Annotated[
        float, typer.Option(min=0, max=1, help="of steps: a sub-agent runs")
    ] = 0.0,
    less_urgent: Annotated[
        float, typer.Option(min=0, max=1, help="share of requests of priority 1")
    ] = 0.0,
    fairness_half_life_s: Annotated[
        float, typer.Option(min=0, help="a trace's fairness ids have shares; 0: none")
    ] = 0.0,
    prefix_caching: Annotated[
        bool, typer.Option(help="requests begin with what others left, or have in the pool")
    ] = True,
    watermark: Annotated[
        float, typer.Option(min=0, max=0.99, help="vLLM's: share of the pool left free")
    ] = 0.0,
    scheduler_reserve_full_isl: Annotated[
        bool, typer.Option(help="vLLM's: all of a prompt must have room")
    ] = True,
    gpus: GpusOption = 1,
    link: LinkOption = None,
    pool_tokens: PoolOption = 0,
    host_gb: HostOption = 256.0,
    max_num_seqs: SeqsOption = 16,
    max_num_batched_tokens: BatchedOption = 2_048,
    drafts: DraftsOption = 0,
    acceptance: AcceptanceOption = None,
    draft_frac: DraftFracOption = DRAFT_FRAC,
    seed: int = 0,
    jobs: Annotated[int, typer.Option(min=0, help="processes; 0: one per core")] = 0,
    cache: CacheOption = None,
    json_path: JsonOption = None,
    html: Annotated[Path | None, typer.Option(help="write a report with plots here")] = None,
) -> None:
    """Run policies x rates x SLOs on one workload, and report attainment, latency, and memory."""
    deployment = _chosen(
        measured,
        (model, device_file or device),
        link,
        num_devices=gpus,
        pool_tokens=pool_tokens or None,
        host_memory_bytes=int(host_gb * 1e9),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        drafts=_drafts(drafts, acceptance, draft_frac),
    )
    _check_policies(deployment, policy)
    arrivals = Arrivals(cv=cv, burst=burst, num_turns=turns, turn_gap_s=turn_gap_s)
    workload = _workload(lengths, (trace, trace_step_ms / 1e3), num_requests, arrivals)
    if sessions:
        drawn_by = replace(
            AGENTS.scaled(session_scale),
            num_steps=session_steps,
            branch_frac=branch_frac,
            subagent_frac=subagent_frac,
        )
        workload = _session_workload(drawn_by, sessions, seed=seed)
    workload = replace(workload, less_urgent_frac=less_urgent)
    cells = [
        Cell(
            deployment=deployment,
            workload=workload,
            policy=one,
            label=one.rpartition(":")[2],
            rate_per_s=per_s,
            slo_tbt_s=tbt_ms / 1e3 if scale is None else scale * deployment.base_tbt_s(),
            slo_scale=scale,
            seed=seed,
            prefix_caching=prefix_caching,
            fairness_half_life_s=fairness_half_life_s,
            vllm=VllmOptions(
                watermark=watermark, scheduler_reserve_full_isl=scheduler_reserve_full_isl
            ),
        )
        for scale in ([None] if tbt_ms else slo_scale)
        for per_s in rate or [workload.own_rate_per_s or DEFAULT_RATE_PER_S]
        for one in policy
    ]
    console = Console()
    results = _swept(cells, console, jobs, cache)
    runs = [Run(row=c.row(r), view=r.view) for c, r in zip(cells, results, strict=True)]
    rows, title = [run.row for run in runs], _title(deployment)
    print_rows(rows, title, console)
    for guess in guesses(deployment) if isinstance(deployment, Deployment) else ():
        console.print(f"guess: {guess}", soft_wrap=True)
    _write(json_path, deployment, {"base_slo_s": deployment.base_tbt_s(), "cells": rows})
    _write_report(html, title, f"{workload.name(trace)}; {SIMULATED}", runs)


def _check_policies(deployment: Deployment | MeasuredDeployment, policies: list[str]) -> None:
    """Raise typer.BadParameter for the first policy that the deployment cannot run."""
    for policy in policies:
        try:
            check(deployment, policy)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--policy") from error


def _title(deployment: Deployment | MeasuredDeployment) -> str:
    shape, base_s = deployment.shape(), deployment.base_tbt_s()
    tokens = pool_tokens(shape)
    return f"{deployment.title}, pool of {tokens} tokens, base SLO {1e3 * base_s:.1f} ms"


def _swept(cells: list[Cell], console: Console, jobs: int, cache: Path | None) -> list[CellResult]:
    """Return what came of each cell; `jobs` 0: a process per core."""
    with progress_bar(len(cells), console) as finished:
        return sweep(
            cells,
            jobs=jobs or os.cpu_count() or 1,
            cache=CellCache(cache) if cache else None,
            finished=finished,
        )


def _chosen(
    measured: Path | None,
    given: tuple[Model | None, Device | None],
    link: LinkName | None,
    **settings: Any,
) -> Deployment | MeasuredDeployment:
    """Return the measured engine, or a model on a device. `settings`: fields of `Deployment`."""
    if measured is not None:
        if settings["drafts"] is not None:
            raise typer.BadParameter("--measured is what it was: not with --drafts")
        return _measured(measured)
    model, on = given
    if model is None or on is None:
        raise typer.BadParameter("give --model and --device or --device-file, or --measured")
    deployment = _deployment(model, on, **settings)
    return deployment if link is None else deployment.with_link(link_rates()[link.value])


def _write_report(path: Path | None, title: str, intro: str, runs: list[Run]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(title, intro, [*sweep_sections(runs), definitions(DEFINITIONS)]))


def _workload(
    lengths: LengthsName, trace: tuple[Path | None, float], num_requests: int, arrivals: Arrivals
) -> Workload:
    """Return what arrives. `trace`: its file, if there is one, and OrbitFlow's step in seconds."""
    path, step_s = trace
    return Workload(
        lengths=None if path else published_lengths(lengths.value),
        trace=tuple(_read_trace(path, step_s, num_requests)) if path else (),
        num_requests=num_requests or DEFAULT_NUM_REQUESTS,
        arrivals=arrivals,
    )


def _session_workload(drawn_by: AgentSessions, num: int, *, seed: int) -> Workload:
    try:
        return Workload(trace=tuple(draw_sessions(drawn_by, num, seed=seed)))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--session-steps") from error


def _read_trace(path: Path, step_s: float, num_requests: int) -> list[ArrivingRequest]:
    try:
        return read_trace(path, step_s=step_s)[: num_requests or None]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def size(
    model: ModelOption,
    context: Annotated[int, typer.Option(min=1, help="prompt tokens of each question")],
    device: DeviceOption = None,
    device_file: DeviceFileOption = None,
    policy: PoliciesOption = DEFAULT_POLICIES,
    reading_rate: Annotated[
        float, typer.Option(min=0.1, help="tokens per second")
    ] = READING_RATE_TPS,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="of tokens and TTFT")] = 0.95,
    answer: Annotated[int, typer.Option(min=2, help="tokens of each answer")] = 1_024,
    ttft_s: Annotated[float, typer.Option(help="bound on the first token")] = 30.0,
    questions: Annotated[int, typer.Option(min=1, help="of each reader")] = 2,
    max_readers: Annotated[int, typer.Option(min=1)] = 64,
    gpus: GpusOption = 1,
    pool_tokens: PoolOption = 0,
    host_gb: HostOption = 256.0,
    max_num_batched_tokens: BatchedOption = 2_048,
    drafts: DraftsOption = 0,
    acceptance: AcceptanceOption = None,
    draft_frac: DraftFracOption = DRAFT_FRAC,
    link: LinkOption = None,
    seed: int = 0,
    json_path: JsonOption = None,
) -> None:
    """Find how many readers are held at once: each asks, reads the answer, asks again."""
    deployment = _chosen(
        None,
        (model, device_file or device),
        link,
        num_devices=gpus,
        pool_tokens=pool_tokens or None,
        host_memory_bytes=int(host_gb * 1e9),
        max_num_seqs=max_readers,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=context + answer,
        drafts=_drafts(drafts, acceptance, draft_frac),
    )
    assert isinstance(deployment, Deployment)
    _check_policies(deployment, policy)
    readers = Readers(
        num_prompt_tokens=context,
        num_output_tokens=answer,
        consumption_rate_tps=reading_rate,
        num_questions=questions,
        attainment=attainment,
        ttft_s=ttft_s,
    )
    console, answers = Console(), {}
    said: list[tuple[str, str]] = []

    def say(word: str, sentence: str) -> None:
        said.append((word, sentence))
        console.print(f"{word:20} {sentence}", soft_wrap=True)

    room = room_for(deployment, readers)
    say("room", room.in_words())
    described = describe(deployment, request_tokens=context + answer)
    for word, sentence in described:
        say(word, sentence)
    for one in policy:
        trials: list[Trial] = []

        def run(requests: list[ArrivingRequest], name: str = one) -> RunRecord:
            return run_policy(deployment, requests, PlanningOptions(policy=name), seed=seed)

        most = largest_held(run, readers, max_readers=max_readers, tried=trials.append)
        say(one, in_words(most, trials, readers))
        answers[one] = {"readers": most, "trials": [asdict(trial) for trial in trials]}
    found: dict[str, Any] = {"question": asdict(readers), "room": asdict(room)}
    found |= {"described": described, "answers": answers, "said": said}
    _write(json_path, deployment, found)


def _measured(path: Path) -> MeasuredDeployment:
    try:
        return read_decision_log(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _write(
    path: Path | None, deployment: Deployment | MeasuredDeployment, found: dict[str, Any]
) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"definitions": DEFINITIONS, "deployment": asdict(deployment), **found}
        path.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    app()
