"""First come, first served, as the papers' baselines have it: all layers in the pool.

Who comes next is let in when all of its tokens have room; when the batch outgrows the pool, the
newest gives way and goes to the head of the queue:

    fcfs-chunked    prompts in pieces beside the decodes of others (SGLang's chunked prefill)
    sglang          room is kept for a share of each answer's limit, so that few must give way:
                    TokenFlow's baseline (arXiv 2510.02758, section 7.1)
    vllm-recompute  who gave way computes its KV anew; as many run as eLLM's Eq. 5 finds with r = 0,
                    so none whose coming breaks the SLO (eLLM, section 6.1)
    vllm-swap       the same, and the KV of who gave way comes back from the host, whole (ibid.)
    srtf            of those that wait, who has least of its answer's limit left comes next: the
                    limit stands for a prediction (OrbitFlow, section 5.3; no preset, an axis)
"""

import math
from dataclasses import replace

from services.placement.run.papers import ellm
from services.placement.run.resume import ResumeWay
from services.placement.run.types import IDLE, RunDecision, RunRequest, RunSnapshot

PIECE_TOKENS = 512
# SGLang begins at 0.7, and comes down to 0.1 for as long as nobody has to give way.
RESERVED_FRAC = 0.3
RECOMPUTE = frozenset({ResumeWay.RECOMPUTE})
LOAD = frozenset({ResumeWay.LOAD})


def streams(snapshot: RunSnapshot) -> RunDecision:
    """Return everybody, in order: layers leave the pool for them, as the placement policy says."""
    run = tuple(request.request_id for request in snapshot.requests)
    return RunDecision(run=run, offloads=True, valid_for_s=math.inf)


def shortest_first(snapshot: RunSnapshot) -> RunDecision:
    """Return everybody, those that wait by what is left of their answers' limits."""
    order = sorted(
        snapshot.requests, key=lambda r: (not r.runs, 0 if r.runs else r.num_answer_left)
    )
    return replace(streams(snapshot), run=tuple(request.request_id for request in order))


def chunked(snapshot: RunSnapshot, piece_tokens: int = PIECE_TOKENS) -> RunDecision:
    """Return who fits, with `piece_tokens` of prompts in a step."""
    return replace(_in_order(snapshot), ways=RECOMPUTE, chunk_tokens=piece_tokens)


def recompute(snapshot: RunSnapshot) -> RunDecision:
    """Return who fits; nothing comes back from the host."""
    return ellm.decide(snapshot, ellm.EllmRules(uncached_frac=0.0))


def swap(snapshot: RunSnapshot) -> RunDecision:
    """Return who fits; what has a copy on the host comes back from there."""
    return replace(recompute(snapshot), ways=LOAD)


def sglang(snapshot: RunSnapshot, reserved_frac: float = RESERVED_FRAC) -> RunDecision:
    """Return who fits beside that share of what is left of all answers' limits."""
    return replace(_in_order(snapshot, reserved_frac), ways=RECOMPUTE)


def _in_order(snapshot: RunSnapshot, reserved_frac: float = 0.0) -> RunDecision:
    """Return a decision for the next step."""
    if not snapshot.requests:
        return IDLE
    num_blocks, num_seats = snapshot.engine.num_blocks, snapshot.engine.max_num_seqs
    now = snapshot.blocks(growth=1)
    batch = sorted((r for r in snapshot.requests if r.runs), key=lambda r: -r.arrival_age_s)
    leave: list[RunRequest] = []
    num_taken = sum(now[r.request_id] for r in batch)
    while len(batch) > 1 and num_taken > num_blocks:
        leave.append(batch.pop())
        num_taken -= now[leave[-1].request_id]
    later = {
        r.request_id: snapshot.num_blocks(r, growth=1 + int(reserved_frac * r.num_answer_left))
        for r in snapshot.requests
    }
    num_taken = sum(later[r.request_id] for r in batch)
    for request in snapshot.requests:
        if request.runs:
            continue
        num_taken += later[request.request_id]
        fits = len(batch) < num_seats and num_taken <= num_blocks
        if leave or (batch and not fits):
            break
        batch.append(request)
    return RunDecision(
        run=tuple(r.request_id for r in batch), park=frozenset(r.request_id for r in leave)
    )
