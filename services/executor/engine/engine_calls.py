"""Calls that the front makes into the EngineCore process.

vLLM's client calls a method of EngineCore by its name; the core serves such calls between two
steps, and while it idles. Our scheduler's module is imported there, so it can add methods.
"""

import time
from typing import Any

from vllm.v1.engine.core import EngineCore

DELIVER = "evenflow_deliver"
TURN = "evenflow_turn"
HOLD = "evenflow_hold"
REPACE = "evenflow_repace"
OBSERVE = "evenflow_observe"
HELD = "evenflow_held"
DESCRIBE = "evenflow_describe"
KEEP_TURNS = "evenflow_keep_turns"
RELEASE_SESSION = "evenflow_release_session"
KV_HOLDERS = "evenflow_kv_holders"
NUM_MEASURED_STEPS = 3


def install() -> None:
    """Add our calls to EngineCore in this process. Idempotent."""
    setattr(EngineCore, DELIVER, _deliver)
    setattr(EngineCore, TURN, _turn)
    setattr(EngineCore, HOLD, _hold)
    setattr(EngineCore, REPACE, _repace)
    setattr(EngineCore, OBSERVE, _observe)
    setattr(EngineCore, HELD, _held)
    setattr(EngineCore, DESCRIBE, _describe)
    setattr(EngineCore, KEEP_TURNS, _keep_turns)
    setattr(EngineCore, RELEASE_SESSION, _release_session)
    setattr(EngineCore, KV_HOLDERS, _kv_holders)


def _deliver(core: Any, counts: dict[str, tuple[int, float]]) -> None:
    """Take over how many tokens each reader has; see `ReaderStateMixin.deliver`."""
    core.scheduler.deliver(counts)


def _turn(core: Any, turns: dict[str, tuple[int, bool]]) -> None:
    """Take over from which token on each answer is read, or is not; see `ReaderStateMixin.turn`."""
    core.scheduler.turn(turns)


def _hold(core: Any, holds: dict[str, bool]) -> None:
    """Hold requests back or let them go on; see `ReaderStateMixin.hold`."""
    core.scheduler.hold(holds)


def _repace(core: Any, paces: dict[str, dict[str, Any]]) -> None:
    """Take over what requests are promised from now on; see `ReaderStateMixin.repace`."""
    core.scheduler.repace(paces)


def _observe(core: Any) -> dict[str, Any]:
    """Return an `EngineObservation` as plain data."""
    plain: dict[str, Any] = core.scheduler.observe()
    return plain


def _held(core: Any) -> list[str]:
    """Return the ids of the requests that the scheduler has, without those that have ended."""
    return list(core.scheduler.records)


def _keep_turns(core: Any, turns: dict[str, float]) -> None:
    """Keep what turns with tool calls leave; see `ReaderStateMixin.keep_turns`."""
    core.scheduler.keep_turns(turns)


def _release_session(core: Any, account: str, session_id: str) -> int:
    """Keep nothing for a session any more; see `ReaderStateMixin.release_session`."""
    num_tokens: int = core.scheduler.release_session(account, session_id)
    return num_tokens


def _kv_holders(core: Any, max_sessions: int) -> dict[str, Any]:
    """Return `KVHolders` as plain data; see `ReaderStateMixin.kv_holders`."""
    plain: dict[str, Any] = core.scheduler.kv_holders(max_sessions)
    return plain


def _describe(core: Any) -> dict[str, Any]:
    """Return what layer-wise KV has to work with; runs a few steps of one token to time them."""
    described: dict[str, Any] = core.scheduler.describe()
    return {
        **described,
        "weight_bytes": sum(core.model_executor.collective_rpc("weight_bytes")),
        "step_s": min(_step_s(core) for _ in range(NUM_MEASURED_STEPS)),
    }


def _step_s(core: Any) -> float:
    begun_s = time.perf_counter()
    core.execute_dummy_batch()
    return time.perf_counter() - begun_s
