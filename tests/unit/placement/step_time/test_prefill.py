"""A prompt under computation costs its chunk and reads its earlier chunks again."""

import dataclasses

import pytest

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.judging.slo import promise_of
from services.placement.step_time.batch import predicted_step_s
from services.placement.step_time.patterns import RESIDENT, Pattern
from services.placement.step_time.prefill import Progress, progress_of
from services.placement.types import Link, Profile, RequestPhase, RequestState


def prompt(name: str, *, num_prompt: int, num_computed: int) -> RequestState:
    return make_request(
        name,
        num_prompt,
        phase=RequestPhase.PREFILL,
        num_prompt_tokens=num_prompt,
        num_output_tokens=0,
        num_computed_tokens=num_computed,
        num_host_blocks=(num_computed // 16,) * 8,
    )


def test_decodes_come_first_and_prompts_share_what_is_left_in_order() -> None:
    engine = make_engine(max_num_batched_tokens=1_000)
    batch = [
        prompt("p", num_prompt=900, num_computed=200),
        make_request("d"),
        prompt("q", num_prompt=5_000, num_computed=0),
        prompt("r", num_prompt=5_000, num_computed=320),
    ]

    # 1 for the decode; 700 that p still needs; the other 299 go to q; nothing to r.
    assert progress_of(batch, engine) == [
        Progress(num_tokens=200, num_left=700, chunk=700),
        Progress(num_tokens=1_600),
        Progress(num_tokens=0, num_left=5_000, chunk=299),
        Progress(num_tokens=320, num_left=4_680, chunk=0),
    ]


def test_a_limit_on_chunks_holds_per_request() -> None:
    engine = make_engine(max_num_batched_tokens=1_000, max_prefill_chunk_tokens=256)
    batch = [prompt(name, num_prompt=5_000, num_computed=0) for name in "pqrst"]

    assert [one.chunk for one in progress_of(batch, engine)] == [256, 256, 256, 232, 0]


def test_a_prompt_advances_by_its_chunk_and_then_decodes() -> None:
    one = Progress(num_tokens=1_000, num_left=700, chunk=300)

    assert one.num_chunk_steps == 3
    assert [one.tokens_read_at(step) for step in range(5)] == [1_000, 1_300, 1_600, 1_700, 1_701]
    assert [one.chunk_at(step) for step in range(5)] == [300, 300, 300, 0, 0]
    assert [one.decodes_at(step) for step in range(5)] == [False, False, False, True, True]


def test_a_prompt_without_a_turn_costs_nothing() -> None:
    one = Progress(num_tokens=1_000, num_left=700, chunk=0)

    assert one.waits
    assert (one.tokens_read_at(5), one.chunk_at(5), one.decodes_at(5)) == (0, 0, False)


PROFILE = Profile(
    outside_layers_s=0.002,
    layer_base_s=0.001,
    layer_s_per_token=1e-6,
    layer_s_per_context_token=1e-8,
    prefill_s_per_token=8e-5,
)
LINK = Link(bytes_per_s=65_536 / 1e-5)  # 10 us per block


def test_a_chunk_costs_its_compute_and_the_copies_of_earlier_chunks() -> None:
    # Layer 8 of 8 is offloaded. 1600 tokens are there: 100 blocks, 1 ms of copying, hidden behind
    # 7 layers. 500 new tokens at 8e-5 s over 8 layers add 5 ms to each layer.
    request = prompt("p", num_prompt=2_100, num_computed=1_600)
    snapshot = make_snapshot(request, profile=PROFILE, h2d=LINK)
    hidden, first = Pattern((7,), 1), Pattern((0,), 1)

    resident_s = predicted_step_s(snapshot, [(request, RESIDENT)])

    assert resident_s == pytest.approx(0.002 + 8 * (0.001 + 0.005))
    assert predicted_step_s(snapshot, [(request, hidden)]) == pytest.approx(resident_s)
    # Layer 1 has nothing before it to hide behind: its 100 blocks stall for 1 ms.
    assert predicted_step_s(snapshot, [(request, first)]) == pytest.approx(resident_s + 0.001)


def test_a_first_chunk_reads_nothing_again() -> None:
    request = prompt("p", num_prompt=2_100, num_computed=0)
    snapshot = make_snapshot(request, profile=PROFILE, h2d=LINK)
    everything = Pattern(tuple(range(8)), 1)

    with_copies_s = predicted_step_s(snapshot, [(request, everything)])

    assert with_copies_s == predicted_step_s(snapshot, [(request, RESIDENT)])
    # One step later the whole prompt is there: 131 full blocks in each of 8 layers.
    later_s = predicted_step_s(snapshot, [(request, everything)], growth=2)
    assert later_s > predicted_step_s(snapshot, [(request, RESIDENT)], growth=2) + 0.001


def test_without_a_measured_prefill_time_a_chunk_costs_its_tokens_and_its_reads() -> None:
    request = prompt("p", num_prompt=2_100, num_computed=1_600)
    profile = dataclasses.replace(PROFILE, prefill_s_per_token=0.0)
    snapshot = make_snapshot(request, profile=profile, h2d=LINK)

    # Each layer: 1 ms, 500 tokens * 1 us, 1600 tokens of KV * 10 ns.
    expected_s = 0.002 + 8 * (0.001 + 500e-6 + 16e-6)
    assert predicted_step_s(snapshot, [(request, RESIDENT)]) == pytest.approx(expected_s)


def test_a_prompt_promises_no_tokens_yet() -> None:
    request = dataclasses.replace(prompt("p", num_prompt=2_100, num_computed=1_600), slo_tbt_s=0.01)

    assert promise_of(request, deposit=True) is None
