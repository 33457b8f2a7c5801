"""Pool and seats as a run policy counts them: whole requests, some tokens longer than now."""

from collections.abc import Iterable, Sequence

from services.placement.run.types import RunRequest, RunSnapshot


class Room:
    """What fits, if every request is in the pool with all layers."""

    def __init__(self, snapshot: RunSnapshot, *, growth: int, kept_frac: float = 0.0) -> None:
        """`growth`: tokens by which all have grown; `kept_frac`: of the pool, for no request."""
        self._num_blocks = snapshot.engine.num_blocks * (1.0 - kept_frac)
        self._num_seats = snapshot.engine.max_num_seqs
        self._need = snapshot.blocks(growth=growth)

    def fits(self, batch: Sequence[RunRequest]) -> bool:
        """Return whether pool and seats hold a batch."""
        num_blocks = sum(self._need[r.request_id] for r in batch)
        return num_blocks <= self._num_blocks and len(batch) <= self._num_seats

    def filled(
        self,
        order: Iterable[RunRequest],
        *,
        beside: Sequence[RunRequest] = (),
        num_taken: int = 0,
    ) -> list[RunRequest]:
        """Return what pool and seats hold beside others, in order; one too large is skipped.

        `num_taken`: blocks that are not to be had.
        """
        chosen: list[RunRequest] = []
        num_left = self._num_blocks - num_taken - sum(self._need[r.request_id] for r in beside)
        num_seats = self._num_seats - len(beside)
        for request in order:
            need = self._need[request.request_id]
            if num_seats > 0 and need <= num_left:
                chosen.append(request)
                num_left -= need
                num_seats -= 1
        return chosen
