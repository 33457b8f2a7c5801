"""Domain <-> what the scripts take and return.

Epochs and instants travel as strings: Lua would print them with 14 digits.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from services.generation.lifecycle import EDGES, RequestStatus
from services.reporting.load import ExecutorLoad
from services.tracker.types import (
    ExecutorId,
    ExecutorOffer,
    Lease,
    Lifetimes,
    Registration,
    RequestId,
    RequestKey,
    TrackedRequest,
)

Call: TypeAlias = dict[str, Any]

# Redis drops keys so much later than the stored instants say: clocks differ, and the fence of an
# ended lease must outlive its process.
GRACE_S = 3_600.0


EDGES_TABLE = {a.value: {b.value: True for b in later} for a, later in EDGES.items()}


LOAD = TypeAdapter(ExecutorLoad)  # leaves out what another version wrote
RECORD = TypeAdapter(TrackedRequest)  # takes numbers as texts too


def call_at(now_s: float, lifetimes: Lifetimes) -> Call:
    """Return what every script needs."""
    longest_s = max(lifetimes.lease_ttl_s, lifetimes.request_ttl_s, lifetimes.retention_s)
    return {
        "now_s": repr(now_s),
        "keep_ms": _keep_ms(longest_s),
        "lease_expires_at_s": repr(now_s + lifetimes.lease_ttl_s),
        "lives": {state.value: repr(now_s + lifetimes.request_s(state)) for state in RequestStatus},
    }


def encode_load(load: ExecutorLoad) -> str:
    return json.dumps(asdict(load))


def encode_registration(new: Registration) -> Call:
    return {
        "request_id": new.key.request_id,
        "generation": new.generation,
        "num_prompt_tokens": new.num_prompt_tokens,
        "service_level": json.dumps(asdict(new.service_level)),
    }


def decode_lease(executor_id: ExecutorId, flat: Sequence[str], now_s: float) -> Lease | None:
    """Return the lease; None if it is missing or has ended."""
    fields = _pairs(flat)
    if not fields or float(fields["expires_at_s"]) <= now_s:
        return None
    return Lease(
        offer=ExecutorOffer(
            executor_id=executor_id,
            epoch=int(fields["epoch"]),
            address=fields["address"],
            model=fields["model"],
            load=LOAD.validate_json(fields["load"]),
        ),
        expires_at_s=float(fields["expires_at_s"]),
    )


def decode_record(key: RequestKey, text: str | None, now_s: float) -> TrackedRequest | None:
    """Return the record; None if it is missing or has expired."""
    fields = json.loads(text or "{}")
    if not fields or float(fields["expires_at_s"]) <= now_s:
        return None
    level = json.loads(fields["service_level"])
    return RECORD.validate_python({**fields, "key": key, "service_level": level})


def decode_keys(executor_id: ExecutorId, request_ids: Sequence[str]) -> list[RequestKey]:
    return [RequestKey(executor_id=executor_id, request_id=RequestId(i)) for i in request_ids]


def _keep_ms(life_s: float) -> int:
    return int((life_s + GRACE_S) * 1_000)


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
