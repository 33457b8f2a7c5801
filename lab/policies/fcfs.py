"""Baselines that serve first come first served, all layers in the pool.

sglang          room is kept for a share of each answer's limit, so that few must give way:
                TokenFlow's baseline (arXiv 2510.02758, section 7.1)
vllm-recompute  a request that gave way computes its KV anew; as many run as eLLM's Eq. 5 finds
                with r = 0, so none whose coming breaks the SLO (eLLM, section 6.1)
vllm-swap       the same, and the KV of a request that gave way comes back from the host, whole
srtf            of those that wait, the one with least of its answer's limit left comes next:
                the limit stands for a prediction (OrbitFlow, section 5.3)
"""

from dataclasses import replace

from services.placement.run.papers import ellm
from services.placement.run.papers.fcfs import RECOMPUTE, in_order, streams
from services.placement.run.resume import ResumeWay
from services.placement.run.types import RunDecision, RunSnapshot

# SGLang begins at 0.7, and comes down to 0.1 for as long as no request has to give way.
RESERVED_FRAC = 0.3
LOAD = frozenset({ResumeWay.LOAD})


def sglang(snapshot: RunSnapshot, reserved_frac: float = RESERVED_FRAC) -> RunDecision:
    """Return those that fit beside that share of what is left of all answers' limits."""
    return replace(in_order(snapshot, reserved_frac), ways=RECOMPUTE)


def recompute(snapshot: RunSnapshot) -> RunDecision:
    """Return those that fit; nothing comes back from the host."""
    return ellm.decide(snapshot, ellm.EllmRules(uncached_frac=0.0))


def swap(snapshot: RunSnapshot) -> RunDecision:
    """Return those that fit; what has a copy on the host comes back from there."""
    return replace(recompute(snapshot), ways=LOAD)


def shortest_first(snapshot: RunSnapshot) -> RunDecision:
    """Return all, those that wait by what is left of their answers' limits."""
    order = sorted(
        snapshot.requests, key=lambda r: (not r.runs, 0 if r.runs else r.num_answer_left)
    )
    return replace(streams(snapshot), run=tuple(request.request_id for request in order))
