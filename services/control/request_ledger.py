"""What the controller remembers of each request: instants, pauses, and its reader."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.control.answer_lengths import AnswerLengths
from services.pacing.request_buffer import RequestBuffer


@dataclass(slots=True, kw_only=True)
class RequestEntry:
    """One live request. Instants are seconds of the engine's monotonic clock."""

    arrival_s: float
    buffer: RequestBuffer
    first_token_s: float | None = None
    paused_s: float | None = None  # beginning of the running pause
    resumed_s: float | None = None  # end of the last pause
    num_pauses: int = 0  # with the running one
    pause_endable_noted: bool = False  # the running pause was reported to have lasted long enough
    on_hold: bool = False  # its reader has stopped: no plan lets it run
    last_scheduled_s: float | None = None
    preempted_s: float | None = None  # beginning of the running preemption
    run_since_s: float | None = None  # admitted, or back; None: it never ran
    num_parks: int = 0  # by a run policy


class RequestLedger:
    """Entries of live requests, and what those that ended leave behind."""

    def __init__(self) -> None:
        self.entries: dict[str, RequestEntry] = {}
        self._tokenless: dict[str, None] = {}  # still without a first token
        self.last_completion_s: float | None = None
        self.answer_lengths = AnswerLengths()

    def arrived(self, request_id: str, buffer: RequestBuffer, at_s: float) -> None:
        self.entries[request_id] = RequestEntry(arrival_s=at_s, buffer=buffer)
        self._tokenless[request_id] = None

    def step_ended(self, now_s: float) -> None:
        """Record first tokens."""
        for request_id in list(self._tokenless):
            entry = self.entries[request_id]
            if entry.buffer.num_generated:
                entry.first_token_s = now_s
                del self._tokenless[request_id]

    def paused(self, request_id: str, now_s: float) -> None:
        """Record the beginning of a pause; during one this changes nothing."""
        entry = self.entries[request_id]
        if entry.paused_s is None:
            entry.paused_s, entry.num_pauses = now_s, entry.num_pauses + 1
            entry.pause_endable_noted = False

    def resumed(self, request_id: str, now_s: float) -> None:
        """Record the end of a pause; without one this changes nothing."""
        entry = self.entries[request_id]
        if entry.paused_s is not None:
            entry.paused_s, entry.resumed_s = None, now_s

    def scheduled(self, request_ids: Iterable[str], now_s: float) -> None:
        """Record who is part of a step."""
        for request_id in request_ids:
            entry = self.entries.get(request_id)
            if entry is not None:
                if entry.run_since_s is None or entry.preempted_s is not None:
                    entry.run_since_s = now_s
                entry.last_scheduled_s, entry.preempted_s = now_s, None

    def preempted(self, request_id: str, now_s: float) -> None:
        self.entries[request_id].preempted_s = now_s

    def gone(self, request_id: str, now_s: float, *, num_output_tokens: int | None) -> None:
        """Forget a request. `num_output_tokens`: of a complete answer, None if it was aborted."""
        if self.entries.pop(request_id, None) is None:
            return
        self._tokenless.pop(request_id, None)
        self.last_completion_s = now_s
        if num_output_tokens is not None:
            self.answer_lengths.ended(num_output_tokens)

    def pauses(self) -> Iterator[tuple[str, RequestEntry, float]]:
        """Yield paused requests: id, entry, beginning of the pause."""
        for request_id, entry in self.entries.items():
            if entry.paused_s is not None:
                yield request_id, entry, entry.paused_s
