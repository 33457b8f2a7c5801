"""Steps of sessions: those that follow others, and what of their prompts is computed again."""

from collections.abc import Mapping, Sequence

from services.placement.types import RequestId
from simulator.engine.records import RunRecord
from simulator.report.figures import quantile
from simulator.sessions import num_known_tokens
from simulator.workload import ArrivingRequest

DEFINITIONS = {
    "next_ttft_p50_s, next_ttft_p95_s": "from the arrival of a step that follows another to its "
    "first token, quantiles, in seconds",
    "recomputed_tokens": "tokens that steps computed and that a cache without end would have had",
}


def figures(
    run: RunRecord, requests: Sequence[ArrivingRequest], block_size: int
) -> dict[str, float]:
    """Return the figures of steps that follow others; none of a workload without."""
    by_id = {one.request_id: one for one in requests}
    ttfts_s = sorted(
        one.generated_s[0] - one.arrival_s
        for one in run.outcomes
        if one.generated_s and by_id[one.request_id].follows
    )
    if not ttfts_s:
        return {}
    return {
        "next_ttft_p50_s": quantile(ttfts_s, 0.5),
        "next_ttft_p95_s": quantile(ttfts_s, 0.95),
        "recomputed_tokens": float(num_recomputed(run, by_id, block_size)),
    }


def num_recomputed(
    run: RunRecord, by_id: Mapping[RequestId, ArrivingRequest], block_size: int
) -> int:
    """Return how many tokens more were computed than by a cache without end; of complete runs."""
    served = sorted((one for one in run.outcomes if one.generated_s), key=lambda one: one.arrival_s)
    known = num_known_tokens([by_id[one.request_id] for one in served], block_size)
    num_needed = sum(one.num_prompt_tokens + len(one.generated_s) - 1 for one in served)
    return run.totals.num_computed_tokens - (num_needed - sum(known.values()))
