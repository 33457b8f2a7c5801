"""Steps beside what was expected of them."""

import pytest

from services.control.measures.profile import OnlineProfile
from services.control.measures.step_timing import StepTiming
from services.control.plans.counts import ControllerCounts
from services.control.requests.request_ledger import RequestLedger
from services.control.step_meter import StepMeter
from services.control.types import ScheduledStep, StepSample
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


def make_meter(counts: ControllerCounts) -> StepMeter:
    engine = FakeEngine("a")
    return StepMeter(engine, RequestLedger(engine.records), counts, mismatch_frac=0.0)


def settled(counts: ControllerCounts) -> StepMeter:
    """Return a meter that knows what steps with and without prompts take."""
    meter = make_meter(counts)
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


def scheduled(meter: StepMeter, number: int, *, at_s: float = 0.0) -> None:
    """Let a step of three decoding requests begin."""
    meter.scheduled(
        ScheduledStep(
            number=number,
            scheduled_s=at_s,
            num_tokens=3,
            num_context_tokens=1_000 * number,
            num_prefill_tokens=0,
            num_prefill_pairs=0,
            same_batch=True,
            undisturbed=True,
        )
    )


def test_a_devices_period_is_a_steps_length_only_where_another_step_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step takes until the next one begins there is also the engine's rest between them."""
    samples: list[StepSample] = []
    monkeypatch.setattr(OnlineProfile, "add", lambda self, sample: samples.append(sample))
    meter = make_meter(ControllerCounts())
    known = [  # with each step's output
        StepTiming(),
        StepTiming(step=1, layer_s=1e-3, period_s=9.0),
        StepTiming(step=2, layer_s=1e-3, period_s=0.025),
    ]
    for number, (begin_s, end_s, busy) in enumerate(
        [(0.0, 0.02, False), (9.0, 9.03, True), (9.03, 9.05, True)], start=1
    ):
        scheduled(meter, number, at_s=begin_s)
        meter.ended(known[number - 1], end_s, busy=busy)

    assert [sample.step_s for sample in samples] == pytest.approx([0.02, 0.025])
    assert [sample.num_context_tokens for sample in samples] == [1_000, 2_000]


def test_what_a_step_computes_anew_counts_as_prompts_of_the_step_that_was_scheduled_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples: list[StepSample] = []
    monkeypatch.setattr(OnlineProfile, "add", lambda self, sample: samples.append(sample))
    meter = make_meter(ControllerCounts())
    scheduled(meter, 1)
    meter.recomputes([])
    scheduled(meter, 2)
    meter.recomputes([8, 4])
    for number in (1, 2):
        meter.ended(StepTiming(step=number, layer_s=1e-3), 0.02 * number, busy=True)

    found = [(s.num_tokens, s.num_context_tokens, s.num_prefill_tokens) for s in samples]
    assert found == [(3, 1_000, 0), (3 + 12, 2_000 + 12, 12)]
    # The tokens of each chunk attend to those before them: 36 and 10.
    assert [sample.num_prefill_pairs for sample in samples] == [0, 46]


@pytest.mark.parametrize(("chunks", "num_predicted"), [([], 1), ([8], 0)])
def test_a_step_that_computes_anew_is_compared_with_no_prediction_of_decodes(
    chunks: list[int], num_predicted: int
) -> None:
    counts = ControllerCounts()
    meter = settled(counts)
    assert meter.take_reference() is not None

    scheduled(meter, 0)
    meter.recomputes(chunks)
    meter.ended(StepTiming(layer_s=1e-3), DECODE_S, busy=False)

    assert counts.sums["num_predicted_steps"] == num_predicted
    assert counts.sums["num_predicted_prompt_steps"] == 1 - num_predicted
