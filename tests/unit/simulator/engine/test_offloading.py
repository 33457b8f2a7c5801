"""vLLM with its OffloadingConnector: whole hits come back from the host before a request runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.policies.presets import full_name
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.copies import Lane
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.machine import Machine
from simulator.engine.offloading import HostTier
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import Outcome, RunRecord
from simulator.engine.simulation import simulate
from simulator.memory.requests import SimulatedRequest, live_request
from simulator.sessions import AgentSessions, draw_sessions
from simulator.workload import ArrivingRequest

SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=400,
    block_bytes=1_000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_host_blocks=4_000,
    max_model_len=400,
)


def make(*, link_bytes_per_s: float = 1e6, policy: str = "vllm-offloading", **shape) -> Engine:
    """Return an engine of four layers, of which a token takes 0.1 s each."""
    costs = LinearCosts(layer_base_s=1.0, per_token_s=0.1, outside_step_s=0.5)
    machine = Machine(costs=costs, link_bytes_per_s=link_bytes_per_s, chunk_bytes=1_000)
    options = PlanningOptions(policy=full_name(policy))
    return make_engine(replace(SHAPE, **shape), machine, options)


def asked(name: str, arrival_s: float, num_prompt: int, *, of: str = "") -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=20,
        conversation=of,
    )


def run(engine: Engine, *requests: ArrivingRequest) -> RunRecord:
    return simulate(engine, requests, after_event=lambda event: engine.check_integrity())


def outcome(record: RunRecord, name: str) -> Outcome:
    return next(one for one in record.outcomes if one.request_id == name)


def ttft_s(record: RunRecord, name: str) -> float:
    return outcome(record, name).generated_s[0] - outcome(record, name).arrival_s


# 109 tokens have KV, in 27 full blocks. The next turn's prompt is 110 tokens of history, 30 new.
FIRST = asked("first", 0.0, 90, of="c")
SECOND = asked("second", 1e4, 140, of="c")
FILLS = asked("fills", 5e3, 380)  # 100 blocks of each layer: all
# 32 tokens in one step: 4 layers of 1 + 3.2 s.
STEP_S = 4 * (1.0 + 3.2) + 0.5


@pytest.mark.parametrize(("link_bytes_per_s", "load_s"), [(1e6, 0.108), (1e4, 10.8), (1e3, 108.0)])
def test_a_hit_comes_back_whole_before_the_request_runs(link_bytes_per_s, load_s) -> None:
    """Also where to compute it again would take less: 43 s."""
    record = run(make(link_bytes_per_s=link_bytes_per_s), FIRST, FILLS, SECOND)

    assert outcome(record, "second").num_cached_tokens == 108
    assert record.totals.h2d_bytes == 27 * 4_000
    assert ttft_s(record, "second") == pytest.approx(load_s + STEP_S)


def test_without_the_connector_what_the_pool_has_lost_is_computed_again() -> None:
    record = run(make(policy="vllm"), FIRST, FILLS, SECOND)

    assert outcome(record, "second").num_cached_tokens == 0
    assert (record.totals.h2d_bytes, record.totals.d2h_bytes) == (0, 0)


def test_only_what_the_pool_has_lost_comes_back() -> None:
    # 76 blocks of each layer: of the 73 others and 27 of the conversation the last three are lost.
    record = run(make(), FIRST, replace(FILLS, num_prompt_tokens=285), SECOND)

    assert outcome(record, "second").num_cached_tokens == 108
    assert record.totals.h2d_bytes == 3 * 4_000


def test_others_run_while_a_hit_comes_back() -> None:
    beside = replace(asked("beside", 1e4 + 1.0, 20), num_output_tokens=1)
    record = run(make(link_bytes_per_s=1e3), FIRST, FILLS, SECOND, beside)

    assert ttft_s(record, "beside") == pytest.approx(4 * (1.0 + 2.0) + 0.5)
    assert outcome(record, "second").num_cached_tokens == 108


def test_of_two_that_begin_alike_the_second_waits_for_the_first_one_s_copy() -> None:
    twin = replace(SECOND, request_id=RequestId("twin"))
    record = run(make(), FIRST, FILLS, SECOND, twin)

    assert outcome(record, "twin").num_cached_tokens == 136  # what the first one computes, too
    assert record.totals.h2d_bytes == 27 * 4_000  # once


def test_what_is_on_its_way_to_the_host_is_waited_for() -> None:
    # 27,000 bytes of each layer take 108 s; the pool loses them at once.
    fills = replace(FILLS, arrival_s=230.0, num_output_tokens=1)
    second = replace(SECOND, arrival_s=231.0)
    slow = make(link_bytes_per_s=500.0)
    record = run(slow, FIRST, fills, second)

    assert outcome(record, "second").num_cached_tokens == 108


def test_a_hit_waits_until_all_of_it_has_room() -> None:
    # 75 to 80 blocks of 100: room for the 8 that are new, and none for the 27 that come back.
    holds = asked("holds", 1e4 - 1.0, 300)
    record = run(make(), FIRST, FILLS, holds, SECOND)

    assert outcome(record, "second").generated_s[0] > outcome(record, "holds").generated_s[-1]
    assert outcome(record, "second").num_cached_tokens == 108


def test_a_reader_that_leaves_takes_its_load_along() -> None:
    engine = make(link_bytes_per_s=1e3)
    run(engine, FIRST, FILLS)
    request = live_request(replace(SECOND, arrival_s=0.0), engine.scheduler.geometry)
    engine.scheduler.add(request)
    engine.scheduler.schedule(engine.h2d.now_s)
    assert engine.scheduler.vllm is not None
    assert engine.scheduler.vllm.is_loading(request)

    engine.scheduler.forget(request)

    assert not engine.scheduler.vllm.is_loading(request)
    assert engine.scheduler.pool.num_free == 400
    engine.check_integrity()


class Host:
    """A tier for four blocks whose copies take no time."""

    def __init__(self) -> None:
        lanes = [Lane(bytes_per_s=1e9, chunk_bytes=1_000) for _ in range(2)]
        self.tier = HostTier(num_chunks=4, chunk_bytes=1_000, h2d=lanes[0], d2h=lanes[1])
        self._lanes = lanes

    def wait(self) -> None:
        for lane in self._lanes:
            lane.advance(lane.now_s + 1.0)
        for _ in self.tier.take_in_loads():
            pass
        self.tier.check_integrity()

    def save(self, name: str, *keys: str) -> None:
        self.tier.save(RequestId(name), keys)
        self.wait()

    def load(self, name: str, *keys: str) -> None:
        spec = asked(name, 0.0, 40)
        request: SimulatedRequest = live_request(spec, SHAPE.geometry)
        self.tier.load(request, 0, keys)
        self.wait()

    def has(self, key: str) -> bool:
        return bool(self.tier.found([key]))


def test_the_least_recently_used_goes_for_what_is_saved() -> None:
    host = Host()
    host.save("a", "a0", "a1")
    host.save("b", "b0", "b1")
    host.tier.ended(RequestId("b"))
    host.tier.ended(RequestId("a"))

    host.save("c", "c0")

    assert [host.has(key) for key in ("a0", "a1", "b0", "b1", "c0")] == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_what_a_request_has_loaded_was_used_when_it_ended() -> None:
    host = Host()
    host.save("a", "a0", "a1")
    host.tier.ended(RequestId("a"))
    host.save("b", "b0", "b1")
    host.tier.ended(RequestId("b"))
    host.load("again", "a0", "a1")
    host.tier.ended(RequestId("again"))

    host.save("c", "c0", "c1")

    assert [host.has(key) for key in ("a0", "a1", "b0", "b1")] == [True, True, False, False]


def test_what_has_no_room_is_saved_later() -> None:
    host = Host()
    host.save("a", "a0", "a1", "a2")
    request = live_request(asked("reads", 0.0, 40), SHAPE.geometry)
    host.tier.load(request, 0, ["a0", "a1", "a2"])  # under way: they stay

    host.tier.save(RequestId("b"), ["b0", "b1"])
    assert host.tier.num_offered(RequestId("b")) == 0
    host.wait()
    host.save("b", "b0", "b1")

    assert host.has("b0")
    assert host.tier.num_offered(RequestId("b")) == 2


SESSIONS = AgentSessions(
    num_steps=4,
    mean_prompt_tokens=90.0,
    seen_frac=0.65,
    answer_tokens=6.0,
    shared_tokens=12,
    session_gap_s=20.0,
    pause_s=30.0,
    branch_frac=0.4,
)


@given(
    seed=st.integers(0, 1_000),
    num_blocks=st.sampled_from([100, 160, 400]),
    num_host_blocks=st.sampled_from([0, 60, 400, 4_000]),
    link_bytes_per_s=st.sampled_from([1e3, 1e5, 1e7]),
)
@settings(max_examples=10, deadline=None)
def test_all_end_in_any_pool_and_nothing_is_computed_that_both_tiers_have(
    seed: int, num_blocks: int, num_host_blocks: int, link_bytes_per_s: float
) -> None:
    steps = draw_sessions(SESSIONS, 2, seed=seed)
    shape = {"num_blocks": 4 * num_blocks, "num_host_blocks": 4 * num_host_blocks}
    engine = make(link_bytes_per_s=link_bytes_per_s, **shape)

    record = run(engine, *steps)

    assert len(record.outcomes) == len(steps)
    if num_host_blocks == 4_000:
        without = run(make(policy="vllm", **shape), *steps)
        assert record.totals.num_cached_tokens >= without.totals.num_cached_tokens
