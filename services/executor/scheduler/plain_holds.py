"""Holds on vLLM's own schedulers, where there are no layers to give back."""

import time
from collections.abc import Iterable

from vllm.v1.request import Request

NEVER = 1 << 60  # a step that does not come
IDLE_WAIT_S = 0.005  # between steps of a batch in which nobody may run


class PlainHolds:
    """Which running requests are skipped. They keep their places and their blocks."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._stopped: set[str] = set()  # that vLLM was told to skip

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def set(self, request_id: str, *, held: bool) -> None:
        """Hold a request from the next step on, or let it go."""
        if held:
            self._held.add(request_id)
        else:
            self._held.discard(request_id)

    def forget(self, request_id: str) -> None:
        self._held.discard(request_id)
        self._stopped.discard(request_id)

    def stop_and_start(self, running: Iterable[Request]) -> None:
        """Tell vLLM which running requests to skip in the next step."""
        if not self._held and not self._stopped:
            return
        for request in running:
            if request.request_id in self._held:
                self._stopped.add(request.request_id)
                request.next_decode_eligible_step = NEVER
            elif request.request_id in self._stopped and request.num_in_flight_tokens == 0:
                # Its last token is known first: the next step must not look for it in the last one.
                self._stopped.discard(request.request_id)
                request.next_decode_eligible_step = 0

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which nobody ran, if somebody is held."""
        if self._held and not num_scheduled:
            time.sleep(IDLE_WAIT_S)
