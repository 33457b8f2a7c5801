import json

from services.executor.observation import (
    EngineObservation,
    PrefixObservation,
    RequestObservation,
    from_plain,
    to_plain,
)
from services.pacing.cause import Cause
from services.placement.types import RequestPhase


def make_request(request_id: str = "a", **overrides: object) -> RequestObservation:
    fields: dict[str, object] = {
        "phase": RequestPhase.DECODING,
        "num_prompt_tokens": 5,
        "num_computed_tokens": 8,
        "num_generated_tokens": 4,
        "num_delivered_tokens": 1,
        "num_deposited_tokens": 3,
        "num_late_tokens": 2,
        "interval_s": 0.5,
        "residency": "ROB",
    }
    return RequestObservation(request_id=request_id, **{**fields, **overrides})  # type: ignore[arg-type]


def test_an_observation_survives_the_way_between_processes() -> None:
    observation = EngineObservation(
        requests=(
            make_request("a"),
            make_request("b", phase=RequestPhase.PREEMPTED, late_cause=Cause.PAUSE),
        ),
        num_steps=7,
        observed_step_s=0.01,
        predicted_step_s=0.02,
        num_pool_blocks=9,
        num_free_pool_blocks=3,
        num_cached_tokens=16,
        tokens_per_step=2.5,
        prefixes=(PrefixObservation(request_ids=("a", "b"), num_tokens=8, residency="RO"),),
    )

    assert from_plain(json.loads(json.dumps(to_plain(observation)))) == observation
