"""Live requests and trunks in the planner's terms: the same in the engine and in the simulator."""

from collections.abc import Sequence
from typing import Any, Protocol

from services.control.kv import NOTHING, KVView
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.placement.types import (
    EngineShape,
    PrefixId,
    PrefixState,
    RequestId,
    RequestPhase,
    RequestState,
)


class SchedulerRequest(Protocol):
    """A scheduler's request: vLLM's `Request` is one."""

    num_computed_tokens: int
    num_preemptions: int

    @property
    def request_id(self) -> str: ...

    @property
    def arrival_time(self) -> float:
        """Seconds of some clock."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are known: prompt and output."""


def phase_of(request: SchedulerRequest, record: RequestRecord[Any]) -> RequestPhase:
    """Return a request's phase."""
    if record.state.is_queued:
        return RequestPhase.PREEMPTED if request.num_preemptions else RequestPhase.WAITING
    if record.is_held:
        return RequestPhase.PAUSED
    # Between two steps a request that decodes has its newest token still to compute.
    num_left = request.num_tokens - request.num_computed_tokens
    decodes = num_left <= (1 if request.num_output_tokens else 0)
    return RequestPhase.DECODING if decodes else RequestPhase.PREFILL


def trunks_in_steps(record: RequestRecord[Any]) -> Sequence[Any]:
    """Return the trunks that a request in the batch begins with; none while it is in the queue."""
    return () if record.kv is None or record.state.is_queued else record.kv.trunks


class StateReader:
    """Reads requests at one instant, of the clock that the records' instants are on."""

    def __init__(self, engine: EngineShape, ledger: RequestLedger, now_s: float) -> None:
        self._engine, self._ledger, self._now_s = engine, ledger, now_s

    def state(self, request: SchedulerRequest, record: RequestRecord[Any]) -> RequestState:
        """Return one request's state: of its own part, but that a prompt has a token."""
        engine, now_s, phase = self._engine, self._now_s, phase_of(request, record)
        # A request that is being brought back holds blocks and has no tokens yet.
        kv = NOTHING if record.kv is None or record.state.is_queued else record.kv.view
        num_shared = 0 if record.kv is None else record.kv.num_shared
        num_shared_tokens = num_shared * engine.block_size
        level = record.buffer.service_level
        num_output = request.num_output_tokens
        predicted = self._ledger.answer_lengths.predict(
            num_output_tokens=num_output, max_tokens=request.max_tokens
        )
        num_computed = min(request.num_computed_tokens, request.num_tokens)
        is_paused = phase is RequestPhase.PAUSED
        low, high = predicted if predicted is not None else (None, None)
        return RequestState(
            request_id=RequestId(request.request_id),
            phase=phase,
            num_prompt_tokens=max(1, request.num_prompt_tokens - num_shared_tokens),
            num_output_tokens=num_output,
            num_computed_tokens=max(0, num_computed - num_shared_tokens),
            num_deposited_tokens=min(record.buffer.num_deposited(now_s), num_output),
            last_release_age_s=_age(record.buffer.last_release_s(now_s), now_s),
            paused_age_s=_age(record.held_since_s, now_s) or 0.0 if is_paused else None,
            resumed_age_s=_age(record.resumed_s, now_s),
            slo_tpot_s=level.slo_tpot_s,
            slo_tbt_s=level.slo_tbt_s,
            priority=record.priority,
            predicted_min_output_tokens=low,
            predicted_max_output_tokens=high,
            on_hold=record.waits_for_reader,
            prefix_ids=tuple(PrefixId(trunk.request_id) for trunk in trunks_in_steps(record)),
            tokens_per_step=self._ledger.tokens_per_step_of(record),
            **self._where(kv, num_shared),
        )

    def prefix(self, trunk: Any) -> PrefixState:
        """Return a trunk's state."""
        return PrefixState(
            prefix_id=PrefixId(trunk.request_id),
            num_tokens=trunk.num_own_tokens,
            **self._where(trunk.view, trunk.num_shared),
        )

    def _where(self, kv: KVView, num_shared: int) -> dict[str, Any]:
        """Return where a holder's blocks are; the first `num_shared` of a row are not its own."""
        engine = self._engine
        return {
            "offloaded_layers": tuple(
                layer for group in kv.offloaded for layer in engine.layers_of(group)
            ),
            "num_prefetch_buffers": kv.num_buffers,
            "num_blocks": kv.num_blocks,
            "num_host_blocks": tuple(max(0, one - num_shared) for one in kv.num_host_blocks),
        }


def _age(instant_s: float | None, now_s: float) -> float | None:
    return None if instant_s is None else max(0.0, now_s - instant_s)
