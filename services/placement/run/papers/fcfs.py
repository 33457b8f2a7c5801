"""First come, first served, as the papers' baselines have it: all layers in the pool.

The next request is let in when all of its tokens have room; when the batch outgrows the pool, the
newest gives way and goes to the head of the queue:

    streams         every request, in order: what an admission limits
    fcfs-chunked    prompts in pieces beside the decodes of others (SGLang's chunked prefill)
"""

import math
from dataclasses import replace

from services.placement.run.resume import ResumeWay
from services.placement.run.types import IDLE, RunDecision, RunRequest, RunSnapshot

PIECE_TOKENS = 512
RECOMPUTE = frozenset({ResumeWay.RECOMPUTE})


def streams(snapshot: RunSnapshot) -> RunDecision:
    """Return all, in order: layers leave the pool for them, as the placement says."""
    run = tuple(request.request_id for request in snapshot.requests)
    return RunDecision(run=run, offloads=True, valid_for_s=math.inf)


def chunked(snapshot: RunSnapshot, piece_tokens: int = PIECE_TOKENS) -> RunDecision:
    """Return those that fit, with `piece_tokens` of prompts in a step."""
    return replace(in_order(snapshot), ways=RECOMPUTE, chunk_tokens=piece_tokens)


def in_order(snapshot: RunSnapshot, reserved_frac: float = 0.0) -> RunDecision:
    """Return those that fit, beside that share of what is left of all answers' limits."""
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
