"""How prompts are computed beside requests that decode: in pieces, so that no token is late."""

from collections.abc import Sequence

from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.promise import holds_few, reading_fracs
from services.placement.run.step_estimate import Steps, compute_s
from services.placement.run.types import RunRequest, RunSnapshot


def prompts_s(snapshot: RunSnapshot, requests: Sequence[RunRequest]) -> float:
    """Return how long what requests have left before they decode takes, one after the other; 0:
    nothing is measured.
    """
    costs = snapshot.costs
    return costs.prompt_s(sum([r.num_left for r in requests])) if costs else 0.0


def are_hidden(
    snapshot: RunSnapshot, batch: Sequence[RunRequest], prompts: Sequence[RunRequest]
) -> bool:
    """Return whether what every reader of a batch has in hand covers `prompts`.

    Readers whose pace no step keeps wait anyway.
    """
    costs = snapshot.costs
    paced = [r for r in batch if r.rate_tps and not snapshot.is_prompt(r)]
    if costs is not None:
        step_s = compute_s(costs, batch)
        paced = [r for r in paced if r.steps_per_s * step_s < 1.0]
    if not paced:
        return True
    if costs is None or not costs.chunk_token_s:
        return False
    return prompts_s(snapshot, prompts) <= min([r.slack_s for r in paced])


def chunk_tokens(
    snapshot: RunSnapshot,
    batch: Sequence[RunRequest],
    steps: Steps,
    rules: EvenflowRules,
    *,
    is_waited_for: bool,
) -> int | None:
    """Return how much of prompts the next step computes; None: as much as vLLM would.

    `is_waited_for`: a request waits for room. Then short pieces, which carry decodes, are worth
    what they make a prompt longer, if these end the sooner for it: readers that need most steps.
    """
    costs = snapshot.costs
    decoding = [request for request in batch if request.runs and not snapshot.is_prompt(request)]
    paced = [request for request in decoding if request.rate_tps]
    if costs is None or not paced or not costs.chunk_token_s:
        return None
    if holds_few(snapshot, snapshot.requests):
        return None  # the batch would miss a newcomer in pieces too much
    step_s = steps.decode_s(decoding, growth=0)
    # A reader that is late already gains nothing from a step shorter than its interval.
    interval_s = min(1.0 / request.steps_per_s for request in paced)
    left_s = max(min(request.spare_s for request in paced), interval_s)
    left_s -= rules.safety_s + step_s + costs.chunk_base_s
    if left_s < max(rules.floor_frac * step_s, rules.min_chunk * costs.chunk_token_s):
        return None  # nothing hides it: as few long steps as possible
    most = snapshot.engine.max_num_batched_tokens
    if is_waited_for:
        fracs = reading_fracs(snapshot, batch)
        if sum(fracs.values()) > rules.slow_frac * len(fracs):
            most = min(most, rules.max_chunk)
    return min(most, int(left_s / costs.chunk_token_s))
