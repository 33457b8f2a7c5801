"""Steps beside what was expected of them."""

import pytest

from services.control.measures.profile import OnlineProfile
from services.control.measures.step_timing import StepTiming
from services.control.plans.counts import ControllerCounts
from services.control.seam import ScheduledStep
from services.control.step_meter import StepMeter
from services.control.types import StepSample
from tests.unit.control.fake_engine import FakeEngine

DECODE_S = 0.02


def step(meter: StepMeter, *, step_s: float, num_prefill_tokens: int = 0) -> None:
    """Let a step of one decoding request pass that waits 5 ms for copies."""
    meter.scheduled(
        ScheduledStep(
            scheduled_s=0.0,
            num_tokens=1 + num_prefill_tokens,
            num_context_tokens=1_000,
            num_prefill_tokens=num_prefill_tokens,
            num_prefill_pairs=0,
            same_batch=True,
            undisturbed=True,
        )
    )
    layer_s = DECODE_S / 4 / meter._engine.shape.num_layers
    meter.ended(StepTiming(layer_s=layer_s, stall_s=0.005), step_s + 0.005, busy=False)


def settled(counts: ControllerCounts) -> StepMeter:
    """Return a meter that knows what steps with and without prompts take."""
    meter = StepMeter(FakeEngine("a"), counts, mismatch_frac=0.0)
    for _ in range(8):
        step(meter, step_s=DECODE_S)
    for _ in range(200):
        step(meter, step_s=DECODE_S + 100 * 1e-4, num_prefill_tokens=100)
    counts.take()
    return meter


def test_a_step_with_a_prompt_is_compared_with_what_prompts_took_before() -> None:
    counts = ControllerCounts()
    meter = settled(counts)

    step(meter, step_s=DECODE_S + 100 * 3e-4, num_prefill_tokens=100)

    assert counts.sums["num_predicted_prompt_steps"] == 1
    assert counts.sums["measured_prompt_step_s"] == pytest.approx(0.05)
    assert counts.sums["prompt_abs_error_s"] == pytest.approx(0.02, rel=0.01)


def test_a_step_shorter_than_what_it_waited_counts_as_none() -> None:
    """A counter may not fall: the metrics would refuse it, and the engine would end."""
    counts = ControllerCounts()
    meter = settled(counts)

    step(meter, step_s=-0.001, num_prefill_tokens=100)

    assert counts.sums["num_predicted_prompt_steps"] == 1
    assert counts.sums["measured_prompt_step_s"] == 0.0


def test_a_devices_period_is_a_steps_length_only_where_another_step_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step takes until the next one begins there is also the engine's rest between them."""
    samples: list[StepSample] = []
    monkeypatch.setattr(OnlineProfile, "add", lambda self, sample: samples.append(sample))
    meter = StepMeter(FakeEngine("a"), ControllerCounts(), mismatch_frac=0.0)
    known = [  # with each step's output
        StepTiming(),
        StepTiming(step=1, layer_s=1e-3, period_s=9.0),
        StepTiming(step=2, layer_s=1e-3, period_s=0.025),
    ]
    for number, (begin_s, end_s, busy) in enumerate(
        [(0.0, 0.02, False), (9.0, 9.03, True), (9.03, 9.05, True)], start=1
    ):
        meter.scheduled(
            ScheduledStep(
                number=number,
                scheduled_s=begin_s,
                num_tokens=1,
                num_context_tokens=1_000 * number,
                num_prefill_tokens=0,
                num_prefill_pairs=0,
                same_batch=True,
                undisturbed=True,
            )
        )
        meter.ended(known[number - 1], end_s, busy=busy)

    assert [sample.step_s for sample in samples] == pytest.approx([0.02, 0.025])
    assert [sample.num_context_tokens for sample in samples] == [1_000, 2_000]
