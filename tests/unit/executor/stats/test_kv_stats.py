"""Connector stats: merged over ranks and over time by one method."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.control.counters import Counters
from services.control.plans.counts import ControllerCounts
from services.control.types import Trigger
from services.executor.copies.device.cpu_device import CpuDevice
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.timing.rank_stats import RankStats
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.stats.controller_metrics import MAX_FAIRNESS_IDS, ControllerPromMetrics
from services.executor.stats.kv_metrics import COUNTERS, GAUGES, KVPromMetrics
from services.executor.stats.kv_stats import KVStats, Residencies
from services.executor.step_messages import SaveOrder, StepTransfers
from services.placement.judging.plan_rules import Verdict
from services.placement.run.resume import ResumeWay

pytestmark = pytest.mark.filterwarnings("default")


def of_rank(rank: str, **sums: float) -> KVStats:
    return KVStats(data={"ranks": {rank: sums}})


def test_bytes_add_up_over_ranks_and_times_are_those_of_the_slowest() -> None:
    steps = [
        of_rank("0", h2d_bytes=10, stall_s=0.1),
        of_rank("1", h2d_bytes=10, stall_s=0.3),
        of_rank("0", h2d_bytes=5, stall_s=0.4),
        of_rank("1", h2d_bytes=5, stall_s=0.0),
    ]
    total = KVStats()
    for step in steps:
        total = total.aggregate(step)

    assert total.reduce()["h2d_bytes"] == 30
    assert total.reduce()["stall_s"] == 0.5  # rank 0: 0.1 + 0.4


def test_the_schedulers_state_is_the_last_one() -> None:
    earlier = KVStats(data={"scheduler": {"num_offloaded_groups": 3}})
    later = KVStats(data={"scheduler": {"num_offloaded_groups": 1}})

    assert earlier.aggregate(later).aggregate(of_rank("0")).reduce()["num_offloaded_groups"] == 1


def test_aggregating_changes_neither_side() -> None:
    first, second = of_rank("0", num_loads=1), of_rank("0", num_loads=2)

    first.aggregate(second)

    assert first.reduce()["num_loads"] == 1
    assert second.reduce()["num_loads"] == 2


def test_every_figure_reaches_prometheus() -> None:
    registry = CollectorRegistry()

    def bound(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    metrics = KVPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: bound(kind) for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe(of_rank("0", h2d_bytes=10, stall_s=0.002).data)
    metrics.observe(KVStats(data={"scheduler": asdict(Residencies(num_offloaded_groups=3))}).data)

    labels = {"engine": "0"}
    assert registry.get_sample_value("vllm:evenflow_kv_h2d_bytes_total", labels) == 10
    assert registry.get_sample_value("vllm:evenflow_kv_num_offloaded_groups", labels) == 3
    assert registry.get_sample_value("vllm:evenflow_kv_step_stall_s_sum", labels) == 0.002
    assert registry.get_sample_value("vllm:evenflow_kv_step_stall_s_count", labels) == 1


def test_every_count_and_all_that_is_of_now_is_a_metric() -> None:
    names = {field.name for field in fields(Counters)}
    rank_names = {"num_failed_copies", "num_hung_copies", "num_corrupt_copies"}

    assert names | rank_names | {"num_checked_blocks"} <= COUNTERS.keys()
    assert {field.name for field in fields(Residencies)} == GAUGES.keys()


def test_events_add_up_beside_the_schedulers_state() -> None:
    counters = Counters()
    total = KVStats(data={"scheduler": {"num_host_blocks": 4}})
    for _ in range(2):
        before = counters.copy()
        counters.num_losses_hung += 1
        counters.count_resume(ResumeWay.LOAD)
        total = total.aggregate(KVStats(data={"events": counters.since(before)}))

    reduced = total.reduce()
    assert (reduced["num_host_blocks"], reduced["num_losses_hung"]) == (4, 2)
    assert (reduced["num_resumes_load"], "num_pauses" in reduced) == (2, False)


def test_all_that_the_controller_counts_adds_up() -> None:
    counts = ControllerCounts()
    total = KVStats(data={"controller": counts.take()})
    for _ in range(2):
        counts.reasons["fits"] += 1
        counts.triggered(Trigger.HELD)
        counts.attained({"alice": 1.5}, jain_index=0.5)
        counts.judged(Verdict.APPLIED, waited_s=0.5, waited_steps=1)
        total = total.aggregate(KVStats(data={"controller": counts.take()}))

    merged = total.data["controller"]
    assert merged.keys() == counts.take().keys()
    assert (merged["reasons"], merged["triggers"]) == ({"fits": 2}, {"held": 2})
    assert (merged["attained_kv_token_s"], merged["gauges"]["fairness_jain_frac"]) == (
        {"alice": 3.0},
        0.5,
    )
    assert (merged["lateness_s"], merged["lateness_steps"]) == ([0.5, 0.5], [1, 1])


def test_of_many_fairness_ids_the_first_have_labels_and_the_others_one() -> None:
    registry = CollectorRegistry()

    def make(kind: Any, name: str, text: str, labels: Sequence[str] = (), **more: Any) -> Any:
        return kind(name, text, labelnames=["engine", *labels], registry=registry, **more)

    def attained(name: str) -> float | None:
        labels = {"engine": "e", "fairness_id": name}
        return registry.get_sample_value("attained_kv_token_s_total", labels)

    metrics, counts = ControllerPromMetrics((Counter, Gauge, Histogram), make), ControllerCounts()
    for _ in range(2):
        ids = [f"id{number}" for number in range(MAX_FAIRNESS_IDS + 3)]
        counts.attained(dict.fromkeys(ids, 2.0), jain_index=1.0)
        metrics.observe(counts.take(), ("e",))

    assert [attained(name) for name in ("id0", "id999", "other")] == [4.0, 4.0, 12.0]
    assert attained("id1000") is None


def test_a_rank_reports_until_all_that_it_copied_is_told_and_then_nothing() -> None:
    page = torch.zeros((4, 64), dtype=torch.uint8)
    engine = StreamCopyEngine([GroupPages(pool=(page,), host=(page.clone(),))], CpuDevice())
    runner = TransferRunner(engine, 1)
    stats = RankStats(runner, rank=0)
    stats.take()
    assert stats.take() is None
    save = SaveOrder("r", 0, [0, 1], [0, 1], [2, 3], from_staging=False)

    message = StepTransfers(step=1, saves=[save])
    runner.take_in(message)
    runner.begin_step(message)
    runner.end_step()
    reports = [stats.take()]  # the copy may not have ended yet
    runner.watch.wait(runner._running_saves[0].copy)
    runner.feedback()
    while (report := stats.take()) is not None:
        reports.append(report)

    told = [report.data["ranks"]["0"] for report in reports if report is not None]
    engine.close()
    assert sum(rank["d2h_bytes"] for rank in told) == 2 * 64
    assert sum(rank["num_steps"] for rank in told) == 1
    assert len(reports) == 2  # the second one by the first look at an idle rank
