"""What layer-wise KV reports with vLLM's connector stats.

Ranks report what they did since the last report; the scheduler reports where things are. Stats
merge over ranks and over time with the same method, so that each rank's sums are kept apart until
they are read.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

SUMMED_OVER_RANKS = frozenset(
    {
        "h2d_bytes",
        "d2h_bytes",
        "num_loads",
        "num_checked_blocks",
        "num_failed_copies",
        "num_hung_copies",
        "num_corrupt_copies",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """One rank's sums."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    h2d_busy_s: float = 0.0  # the link carried something
    d2h_busy_s: float = 0.0
    num_checked_blocks: int = 0  # by the integrity guard
    num_failed_copies: int = 0  # ended without moving every byte
    num_hung_copies: int = 0  # did not end in time
    num_corrupt_copies: int = 0  # brought back other bytes than had left
    stall_s: float = 0.0  # the layers waited for a copy
    num_loads: int = 0  # layer groups loaded into staging, one per request and step
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residencies:
    """Where KV is, over all requests."""

    num_resident_groups: int = 0  # layer groups of requests
    num_offloaded_groups: int = 0
    num_restoring_groups: int = 0  # counted as offloaded too
    num_staging_blocks: int = 0
    num_host_blocks: int = 0  # slots in use
    num_free_blocks: int = 0
    num_lagging_blocks: int = 0  # full blocks of mirrored requests without a complete host copy
    num_paused_requests: int = 0
    num_parked_requests: int = 0
    num_quarantined_blocks: int = 0  # that a hung copy may still write
    num_quarantined_slots: int = 0
    num_anchors: int = 0  # behind columns: of models with windows and states
    num_cached_columns: int = 0  # of the prefix cache, those of live requests included
    num_retained_columns: int = 0  # that clients asked to keep, on the host or not
    num_awaited_columns: int = 0  # kept for turns that wait for their tools, on the host or not
    num_left_blocks: int = 0  # free ones of the pool, whose KV may be found
    num_duplicate_blocks: int = 0  # of the pool, whose KV another holder's have too
    num_trunks: int = 0  # parts that several requests have once
    num_shared_blocks: int = 0  # of the pool, that each further user of a trunk would have


class KVStats(KVConnectorStats):  # type: ignore[misc]
    """`data["ranks"][rank]` and `data["events"]` sums, `data["scheduler"]` the last state.

    `data["controller"]` is what `ControllerCounts.take` returns.
    """

    def aggregate(self, other: KVConnectorStats) -> "KVStats":
        ranks: dict[str, dict[str, float]] = {
            rank: dict(sums) for rank, sums in self.data.get("ranks", {}).items()
        }
        for rank, sums in other.data.get("ranks", {}).items():
            mine = ranks.setdefault(rank, {})
            for name, value in sums.items():
                mine[name] = mine.get(name, 0) + value
        state = other.data.get("scheduler") or self.data.get("scheduler", {})
        events = Counter(self.data.get("events", {}))
        events.update(other.data.get("events", {}))
        controller = _merged(self.data.get("controller", {}), other.data.get("controller", {}))
        merged = {"scheduler": state, "events": dict(events), "controller": controller}
        return KVStats(data={"ranks": ranks, **merged})

    def reduce(self) -> dict[str, int | float]:
        """Return bytes summed over ranks, times of the slowest rank, and the last state."""
        ranks: list[Mapping[str, float]] = list(self.data.get("ranks", {}).values())
        reduced: dict[str, int | float] = {}
        for name in asdict(RankTotals()) if ranks else ():
            values = [sums.get(name, 0) for sums in ranks]
            reduced[name] = sum(values) if name in SUMMED_OVER_RANKS else max(values)
        return {**reduced, **self.data.get("scheduler", {}), **self.data.get("events", {})}

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the controller's counts of both: sums added, lists joined, the newest gauges."""
    if not first or not second:
        return first or second
    names = ("sums", "triggers", "plans", "reasons", "attained_kv_token_s")
    summed = {name: _added(first[name], second[name]) for name in names}
    lists = {name: [*first[name], *second[name]] for name in ("lateness_s", "lateness_steps")}
    return {**summed, **lists, "gauges": {**first["gauges"], **second["gauges"]}}


def _added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
