"""One engine in virtual time: cases by hand, and laws that hold after every event."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from lab.policies.presets import full_name
from services.control.room import resumes
from services.pacing.types import ServiceLevel
from services.placement.judging.contradiction import find_contradiction
from services.placement.run.resume import ResumeWay
from services.placement.types import (
    EngineShape,
    Placement,
    Plan,
    PlanStatus,
    PolicyParameters,
    RequestId,
    RequestPhase,
    Snapshot,
)
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.device.step import CopyCosts
from simulator.engine.engine import Brain, Engine
from simulator.engine.events import Event
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.scheduler import Scheduler, Turn
from simulator.engine.simulation import simulate
from simulator.memory.requests import SimulatedRequest
from simulator.report.figures import delivered_s
from simulator.workload import (
    ArrivingRequest,
    constant_length,
    drawn_requests,
    gamma_gaps,
    with_leavers,
    with_level,
)
from tests.policies import EVERY

BLOCK_BYTES = 1_000


def make_shape(**overrides) -> EngineShape:
    given = {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 4,
        "num_blocks": 400,
        "block_bytes": BLOCK_BYTES,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_host_blocks": 4_000,
        "max_model_len": 400,
    }
    return EngineShape(**(given | overrides))


def make_machine(**overrides) -> Machine:
    costs = LinearCosts(layer_base_s=1.0, outside_step_s=0.5)
    given = {"costs": costs, "link_bytes_per_s": 10_000.0, "chunk_bytes": 1_000}
    return Machine(**(given | overrides))


def request(name: str = "a", *, at: float = 0.0, prompt: int, output: int) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name), arrival_s=at, num_prompt_tokens=prompt, num_output_tokens=output
    )


@dataclass
class Scripted:
    """A policy that answers every snapshot alike, and keeps what it saw."""

    offloaded: tuple[int, ...] = ()
    num_buffers: int = 0
    paused: frozenset[str] = frozenset()
    seen: list[Snapshot] = field(default_factory=list)

    def __call__(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        return Plan(
            epoch=snapshot.epoch,
            policy=snapshot.policy,
            status=PlanStatus.FEASIBLE,
            placements=tuple(
                Placement(
                    request_id=r.request_id,
                    offloaded_layers=self.offloaded,
                    num_prefetch_buffers=self.num_buffers,
                    paused=r.request_id in self.paused,
                )
                for r in snapshot.requests
            ),
        )


def scripted_engine(policy: Scripted, *, machine: Machine | None = None, **shape) -> Engine:
    """Return an engine that asks at changes of the batch only."""
    made = make_shape(**shape)
    parameters = PolicyParameters(min_pause_s=5.0, max_pause_s=20.0)
    options = PlanningOptions(
        policy=full_name("flexgen-plus"), parameters=parameters, plan_latency_s=0.0
    )
    brain = Brain(options=options, policy=policy)
    return Engine(made, machine or make_machine(), brain, offloads=True, seed=0)


def run(engine: Engine, requests: list[ArrivingRequest]) -> RunRecord:
    def check(event: Event) -> None:
        engine.check_integrity()

    return simulate(engine, requests, after_event=check)


def by_name(record: RunRecord) -> dict[str, tuple[float, ...]]:
    return {str(outcome.request_id): outcome.generated_s for outcome in record.outcomes}


def resident_engine(**shape) -> Engine:
    return make_engine(make_shape(**shape), make_machine(), PlanningOptions(policy="vllm"))


def test_a_resident_request_takes_compute_and_the_time_outside_the_layers() -> None:
    # Each step: 4 layers of 1 s and 0.5 s outside.
    record = run(resident_engine(), [request(prompt=10, output=4)])

    assert by_name(record)["a"] == (4.5, 9.0, 13.5, 18.0)


def test_a_long_prompt_takes_a_step_per_chunk() -> None:
    # 100 tokens in chunks of 40, 40, 20: the first token at the end of the third step.
    record = run(resident_engine(max_num_batched_tokens=40), [request(prompt=100, output=2)])

    assert by_name(record)["a"] == (13.5, 18.0)


def test_a_prompt_and_a_decode_share_a_step() -> None:
    # b arrives during a's second step: from the third on both are part of every step.
    record = run(
        resident_engine(), [request(prompt=10, output=4), request("b", at=5.0, prompt=8, output=2)]
    )

    assert by_name(record) == {"a": (4.5, 9.0, 13.5, 18.0), "b": (13.5, 18.0)}


def test_one_offloaded_layer_stalls_each_step_as_computed_by_hand() -> None:
    # Layer 2 (from 0) has 2 s of compute before it. With k blocks of 1000 bytes on the host, its
    # copy takes k / 10 s: a stall of k / 10 - 2 in a step of 4.5 s otherwise. A block that a step
    # fills is on the host 0.4 s after the step's end: too late for the next step.
    policy = Scripted(offloaded=(2,), num_buffers=1)
    engine = scripted_engine(policy, num_blocks=2_000, max_num_batched_tokens=512)
    record = run(engine, [request(prompt=400, output=40)])
    gaps = [later - earlier for earlier, later in pairwise(by_name(record)["a"])]

    # The prompt's 400 blocks take 40 s to the host: until then less is offloaded.
    assert gaps[:4] == [4.5] * 4
    settled = range(12, len(gaps))
    expected = [4.5 + (399 + step) // 4 / 10 - 2 for step in settled]
    assert [gaps[step] for step in settled] == pytest.approx(expected, abs=1e-9)


def test_a_paused_request_gets_no_token_until_its_pause_ends() -> None:
    policy = Scripted(paused=frozenset({"a"}))
    engine = scripted_engine(policy)
    record = run(engine, [request(prompt=8, output=20), request("b", at=30.0, prompt=8, output=20)])
    outcomes = {str(outcome.request_id): outcome for outcome in record.outcomes}

    assert outcomes["a"].num_pauses >= 1
    longest = max(later - earlier for earlier, later in pairwise(outcomes["a"].generated_s))
    # Steps take 4.5 s: the pause of 20 s at most ends at the first step after it, and the token
    # comes at that step's end.
    assert 20.0 <= longest <= 20.0 + 3 * 4.5
    assert len(outcomes["a"].generated_s) == 20
    assert outcomes["b"].num_pauses == 0


def test_nobody_is_left_paused_alone() -> None:
    record = run(
        scripted_engine(Scripted(paused=frozenset({"a", "b"}))),
        [request(prompt=8, output=20), request("b", at=30.0, prompt=8, output=20)],
    )

    assert [len(outcome.generated_s) for outcome in record.outcomes] == [20, 20]


def test_the_newest_request_is_preempted_and_computed_again() -> None:
    # 40 blocks per layer. Two requests of 72 tokens, 18 blocks each, grow to 88 tokens: 22 each.
    record = run(
        resident_engine(num_blocks=160, max_num_batched_tokens=200),
        [request(prompt=72, output=16), request("b", prompt=72, output=16)],
    )
    outcomes = {str(outcome.request_id): outcome for outcome in record.outcomes}

    assert outcomes["a"].num_preemptions == 0
    assert outcomes["b"].num_preemptions == 1
    # b waits for a's end and is then computed again.
    assert [len(outcomes[name].generated_s) for name in "ab"] == [16, 16]
    assert any(t > outcomes["a"].generated_s[-1] for t in outcomes["b"].generated_s)


def test_a_request_that_can_never_fit_is_rejected_at_once() -> None:
    record = run(
        resident_engine(num_blocks=40),
        [request(prompt=30, output=20), request("b", prompt=8, output=2)],
    )
    outcomes = {str(outcome.request_id): outcome for outcome in record.outcomes}

    assert outcomes["a"].rejected
    assert not outcomes["b"].rejected
    assert outcomes["a"].generated_s == ()


def test_what_the_pool_cannot_hold_runs_with_layers_on_the_host() -> None:
    # 120 tokens are 30 blocks per layer, 120 in all: the pool has 64.
    machine = make_machine(link_bytes_per_s=1e6)
    engine = make_engine(
        make_shape(num_blocks=64, max_num_batched_tokens=16),
        machine,
        PlanningOptions(policy=full_name("dynamic-heuristic")),
    )
    record = run(engine, [request(prompt=120, output=30)])

    assert not record.outcomes[0].rejected
    assert len(record.outcomes[0].generated_s) == 30
    assert record.totals.h2d_bytes > 0


def busy_requests(seed: int, num_requests: int = 12) -> list[ArrivingRequest]:
    lengths = (replace(constant_length(60), median=40, largest=120), constant_length(24))
    return drawn_requests(
        gamma_gaps(random.Random(seed), rate_per_s=0.05, cv=2.0),
        lengths,
        num_requests=num_requests,
        seed=seed,
        level=ServiceLevel(slo_tbt_s=6.0),
    )


def busy_engine(policy: str, *, seed: int = 0, num_host_blocks: int = 4_000) -> Engine:
    machine = make_machine(
        link_bytes_per_s=40_000.0,
        copy_overhead_s=1e-3,
        compute_noise_frac=0.05,
        link_noise_frac=0.05,
        copies=CopyCosts(slowdown_frac=0.05, submit_s=1e-3),
    )
    parameters = PolicyParameters(max_window=32, even_patterns_only=True)
    options = PlanningOptions(policy=policy, parameters=parameters, seed=seed)
    shape = make_shape(num_blocks=160, max_num_batched_tokens=32, num_host_blocks=num_host_blocks)
    return make_engine(shape, machine, options, seed=seed)


@pytest.mark.parametrize("num_host_blocks", [150, 4_000], ids=["small-host", "large-host"])
@pytest.mark.parametrize("policy", list(EVERY))
def test_nothing_is_lost_under_any_policy(policy, num_host_blocks) -> None:
    requests = busy_requests(1)
    engine = busy_engine(policy, num_host_blocks=num_host_blocks)
    record = run(engine, requests)  # checks integrity after every event
    outcomes = {outcome.request_id: outcome for outcome in record.outcomes}

    assert outcomes.keys() == {one.request_id for one in requests}
    for one in requests:
        outcome = outcomes[one.request_id]
        assert len(outcome.generated_s) == one.num_output_tokens
        assert outcome.generated_s[0] > one.arrival_s
        assert all(later > earlier for earlier, later in pairwise(outcome.generated_s))
        assert all(
            delivered >= generated
            for delivered, generated in zip(delivered_s(outcome), outcome.generated_s, strict=True)
        )


def preempt_at_random(scheduler: Scheduler) -> None:
    schedule, rng = scheduler.schedule, random.Random(5)

    def preempting(now_s: float) -> list[Turn]:
        if scheduler.running and rng.random() < 0.3:
            scheduler.preempt(rng.choice(scheduler.running), now_s)
        return schedule(now_s)

    scheduler.schedule = preempting


@pytest.mark.parametrize("num_host_blocks", [150, 250, 4_000])
@pytest.mark.parametrize("policy", [full_name("dynamic-heuristic"), "orbitflow"])
def test_nothing_is_lost_while_requests_are_preempted_and_come_back_at_random(
    policy, num_host_blocks, monkeypatch
) -> None:
    """Each way back is taken, where the host and the pool are short, too."""
    ways = random.Random(6)
    monkeypatch.setattr(resumes, "cheapest_resume", lambda *_: ways.choice(list(ResumeWay)))
    engine = busy_engine(policy, num_host_blocks=num_host_blocks)
    preempt_at_random(engine.scheduler)
    record = run(engine, busy_requests(1))

    assert all(len(one.generated_s) == 24 for one in record.outcomes)
    assert min(record.totals.resumes.values()) >= 1


def test_a_request_is_aborted_when_its_reader_has_the_last_token_it_stays_for() -> None:
    level = ServiceLevel(consumption_rate_tps=0.1)
    asked = replace(request(prompt=8, output=10), level=level, leaves_after=2)
    record = run(resident_engine(), [asked])

    # Steps of 4.5 s. The second token is due 10 s after the first, in the fourth step.
    assert by_name(record) == {"a": (4.5, 9.0, 13.5, 18.0)}
    assert record.end_s == 18.0
    assert len(record.outcomes[0].read_s) == 2


def leaving_requests() -> list[ArrivingRequest]:
    slow = with_level(busy_requests(1, num_requests=16), ServiceLevel(slo_tbt_s=20.0))
    return with_leavers(slow, 0.6, seed=1)


def test_a_reader_may_leave_while_its_request_is_parked() -> None:
    engine = busy_engine("tokenflow")
    forget, were_queued = engine.scheduler.forget, list[bool]()

    def noting(request: SimulatedRequest) -> None:
        were_queued.append(request.record.state.is_queued)
        forget(request)

    engine.scheduler.forget = noting
    run(engine, leaving_requests())

    assert any(were_queued)


@pytest.mark.parametrize("policy", ["vllm", "evenflow", "tokenflow", "orbitflow", "ellm"])
def test_nothing_is_lost_when_readers_leave(policy) -> None:
    requests = leaving_requests()
    engine = busy_engine(policy)
    preempt_at_random(engine.scheduler)
    record = run(engine, requests)  # checks integrity after every event

    assert len(record.outcomes) == len(requests)
    for outcome in record.outcomes:
        stayed_for = outcome.leaves_after or outcome.num_output_tokens
        assert len(outcome.read_s) == stayed_for
        assert stayed_for <= len(outcome.generated_s) <= outcome.num_output_tokens
    assert any(len(one.generated_s) < one.num_output_tokens for one in record.outcomes)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert engine.scheduler.host.num_unpromised == engine.scheduler.host.num_blocks


@pytest.mark.parametrize("policy", ["vllm", full_name("dynamic-heuristic"), "orbitflow"])
def test_the_same_seed_gives_the_same_run(policy) -> None:
    requests = busy_requests(1, num_requests=5)
    first = run(busy_engine(policy, seed=3), requests)
    again = run(busy_engine(policy, seed=3), requests)
    other = run(busy_engine(policy, seed=4), requests)

    assert first == again
    assert by_name(first) != by_name(other)


def test_policies_see_a_measured_profile_not_the_machines() -> None:
    policy = Scripted()
    engine = scripted_engine(policy, machine=make_machine(compute_noise_frac=0.01))
    run(engine, [request("a", prompt=8, output=30), request("b", at=60.0, prompt=8, output=30)])
    learnt = []
    for snapshot in policy.seen:
        batch = [r for r in snapshot.requests if r.phase is RequestPhase.DECODING]
        if batch and snapshot.profile is not None:
            num_tokens = sum(r.num_computed_tokens for r in batch)
            learnt.append(snapshot.profile.layer_s(len(batch), num_tokens))

    # 1.0 s per layer in truth; with noise nobody learns exactly that,
    # and from few samples of one batch not what another one takes.
    assert learnt
    assert all(layer_s != pytest.approx(1.0, rel=1e-6) for layer_s in learnt)
    assert all(0.5 < layer_s < 2.0 for layer_s in learnt)


def test_snapshots_contradict_nothing() -> None:
    policy = Scripted(offloaded=(1, 3), num_buffers=1, paused=frozenset({"r2"}))
    engine = scripted_engine(policy, num_blocks=200, max_num_batched_tokens=32)
    run(engine, busy_requests(2))

    assert len(policy.seen) > 5
    assert [find_contradiction(snapshot) for snapshot in policy.seen] == [None] * len(policy.seen)
    assert any(sum(r.num_host_blocks) for s in policy.seen for r in s.requests)
    assert any(r.offloaded_layers for s in policy.seen for r in s.requests)


def test_an_engine_with_nothing_left_to_do_is_sampled_empty() -> None:
    # One step of 4.5 s each, 100 s apart.
    record = run(
        resident_engine(),
        [request("a", prompt=10, output=1), request("b", at=100.0, prompt=10, output=1)],
    )

    found = [(s.time_s, s.num_running, s.pool_used_frac > 0) for s in record.samples]
    assert found == [(4.5, 1, True), (4.5, 0, False), (104.5, 1, True), (104.5, 0, False)]


@pytest.mark.parametrize("sides", [(12, 12), (0, 0, 0), (12, 0)])
def test_groups_that_never_leave_are_counted_at_every_event(sides: tuple[int, ...]) -> None:
    """A prompt of more than the pool, beside others, some of which are parked."""
    engine = make_engine(
        make_shape(num_blocks=70, side_windows=sides, max_in_flight_tokens=16, max_num_seqs=8),
        make_machine(link_bytes_per_s=1e6),
        PlanningOptions(policy="evenflow"),
    )
    asked = [request(prompt=80, output=12)]
    asked += [request(f"r{n}", at=5.0 * n, prompt=9 + 3 * n, output=14) for n in range(8)]

    def check(event: Event) -> None:
        engine.check_integrity()
        assert engine.loop.admission is not None
        for one in engine.loop.admission.snapshot(event.time_s).requests:
            kv = engine.scheduler.moves.requests[one.request_id].kv
            assert one.num_host_tokens == max(4 * kv.num_host_blocks, kv.num_side_tokens)

    record = simulate(engine, asked, after_event=check)

    answers = {name: len(instants) for name, instants in by_name(record).items()}
    assert answers == {str(one.request_id): one.num_output_tokens for one in asked}
    assert not engine.scheduler.caches_prefixes
