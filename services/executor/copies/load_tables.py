"""What each request's steps load on one rank: sent once when it changes, and kept here."""

from array import array
from dataclasses import dataclass, field

from services.executor.step_messages import StepTransfers


def _numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class LoadTable:
    """One offloaded group of one request; pairwise, and packed: they are joined in every step."""

    uids: "array[int]" = field(default_factory=_numbers)
    slots: "array[int]" = field(default_factory=_numbers)
    block_ids: "array[int]" = field(default_factory=_numbers)


@dataclass(slots=True)
class RequestLoads:
    """What one request's steps load: a table per offloaded group, in layer order."""

    tables: dict[int, LoadTable] = field(default_factory=dict)
    num_staging: int = 1
    chain: list[int] = field(default_factory=list)  # the tables' groups, ascending

    def buffer_successor(self, group: int) -> int | None:
        """Return the group that uses a group's staging buffer next in the step."""
        position = self.chain.index(group) + self.num_staging
        return self.chain[position] if position < len(self.chain) else None

    def buffer_predecessor(self, group: int) -> int | None:
        position = self.chain.index(group) - self.num_staging
        return self.chain[position] if position >= 0 else None


class LoadTables:
    """The tables of all requests."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestLoads] = {}

    def update(self, transfers: StepTransfers) -> list[str]:
        """Take in a step's changes; return the requests that ended, or ended and begin anew."""
        ended = []
        for request_id, group in transfers.dropped_tables:
            if group is None:
                self._requests.pop(request_id, None)
                ended.append(request_id)
            elif request_id in self._requests:
                self._requests[request_id].tables.pop(group, None)
                self._requests[request_id].chain = sorted(self._requests[request_id].tables)
        for request_id, num_staging in transfers.num_staging.items():
            self._of(request_id).num_staging = num_staging
        for update in transfers.table_updates:
            loads = self._of(update.request_id)
            if update.replace:
                loads.tables[update.group] = LoadTable()
                loads.chain = sorted(loads.tables)
            table = loads.tables[update.group]
            table.uids.extend(update.uids)
            table.slots.extend(update.slots)
            table.block_ids.extend(update.block_ids)
        return ended

    def of(self, request_ids: list[str]) -> dict[str, RequestLoads]:
        """Return the tables of requests that have some."""
        return {request_id: self._requests[request_id] for request_id in request_ids}

    def _of(self, request_id: str) -> RequestLoads:
        return self._requests.setdefault(request_id, RequestLoads())
