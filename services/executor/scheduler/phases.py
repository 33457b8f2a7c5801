"""Where a request of vLLM's is in its life: for the planner, and for whoever watches."""

from typing import TYPE_CHECKING

from services.placement.types import RequestPhase

if TYPE_CHECKING:
    from vllm.v1.request import Request


def phase_of(request: "Request", *, runs: bool, held: bool) -> RequestPhase:
    """Return a request's phase. `runs`: it is in the running queue."""
    if not runs:
        return RequestPhase.PREEMPTED if request.num_preemptions else RequestPhase.WAITING
    if held:
        return RequestPhase.PAUSED
    # Between two steps a request that decodes has its newest token still to compute.
    num_left = request.num_tokens - request.num_computed_tokens
    decodes = num_left <= (1 if request.num_output_tokens else 0)
    return RequestPhase.DECODING if decodes else RequestPhase.PREFILL
