"""Small engines for run policies: 4 layer groups, blocks of 16 tokens."""

import math

from hypothesis import strategies as st

from services.placement.run.types import RunPhase, RunRequest, RunSnapshot, StepCosts
from services.placement.types import EngineShape, RequestId

# A decode step takes 20 ms and 1 ms per request; a prompt's token 0.1 ms.
COSTS = StepCosts(
    outside_s=0.004,
    base_s=0.020,
    token_s=0.001,
    context_s=0.0,
    chunk_base_s=0.0,
    chunk_token_s=1e-4,
)
BLOCK_BYTES = 1_000
SLOW = 2_000.0  # bytes per second: a block takes half a second


def make_engine(**overrides) -> EngineShape:
    given = {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 16,
        "num_blocks": 400,  # 1,600 tokens
        "block_bytes": BLOCK_BYTES,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_host_blocks": 10_000,
        "max_model_len": 4_000,
    }
    return EngineShape(**(given | overrides))


def ask(name: str, num_tokens: int, *, age_s: float = 10.0, **overrides) -> RunRequest:
    """Return a new request with a prompt of so many tokens, of a reader without a rate."""
    given = {
        "phase": RunPhase.NEW,
        "num_prompt_tokens": num_tokens,
        "num_output_tokens": 0,
        "max_tokens": 100,
        "num_host_tokens": 0,
        "rate_tps": 0.0,
        "slack_s": math.inf,
        "run_age_s": math.inf,
    }
    return RunRequest(request_id=RequestId(name), arrival_age_s=age_s, **(given | overrides))


def runs(name: str, num_tokens: int, *, age_s: float = 20.0, **overrides) -> RunRequest:
    """Return a request that decodes, with a complete host copy."""
    given = {
        "phase": RunPhase.RUNNING,
        "num_output_tokens": 8,
        "num_host_tokens": num_tokens + 8,
        "slack_s": 0.0,
        "run_age_s": 10.0,
    }
    return ask(name, num_tokens, age_s=age_s, **(given | overrides))


def parked(name: str, num_tokens: int, **overrides) -> RunRequest:
    return runs(name, num_tokens, **({"phase": RunPhase.PARKED, "run_age_s": math.inf} | overrides))


def make_snapshot(*requests: RunRequest, **overrides) -> RunSnapshot:
    given = {
        "engine": make_engine(),
        "costs": COSTS,
        "h2d_bytes_per_s": 1e6,
        "h2d_queued_bytes": 0,
        "prefill_frac": 0.0,
        "mean_answer_tokens": 0.0,
    }
    return RunSnapshot(requests=requests, **(given | overrides))


phases = st.sampled_from([RunPhase.NEW, RunPhase.RUNNING, RunPhase.PARKED, RunPhase.RETURNING])


@st.composite
def snapshots(draw, *, rates=(0.0, 5.0, 20.0), largest: int = 1_500) -> RunSnapshot:
    """Draw an engine with up to 12 requests."""
    requests = []
    tokens_per_step = draw(st.sampled_from([1.0, 2.7]))
    for number in range(draw(st.integers(1, 12))):
        phase = draw(phases)
        make = ask if phase is RunPhase.NEW else runs
        requests.append(
            make(
                f"r{number}",
                draw(st.integers(1, largest)),
                age_s=draw(st.floats(0.0, 100.0)),
                phase=phase,
                rate_tps=draw(st.sampled_from(rates)),
                tokens_per_step=tokens_per_step,
                **({} if phase is RunPhase.NEW else {"slack_s": draw(st.floats(-5.0, 50.0))}),
            )
        )
    in_order = sorted(requests, key=lambda r: (not r.runs, -r.arrival_age_s))
    return make_snapshot(
        *in_order,
        h2d_bytes_per_s=draw(st.sampled_from([0.0, SLOW, 1e5, 1e7])),
        mean_answer_tokens=draw(st.sampled_from([0.0, 60.0])),
        prefill_frac=draw(st.floats(0.0, 1.0)),
    )
