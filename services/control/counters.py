"""What the scheduler counts: made once, handed to every part, which adds to it where it acts."""

from dataclasses import asdict, dataclass, field, fields, replace

from services.placement.run.resume import ResumeWay


def _counter(text: str) -> int:
    """A field that starts at 0; `text` is what Prometheus says of it."""
    number: int = field(default=0, metadata={"text": text})
    return number


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since the engine started."""

    # Blocks and layer groups.
    num_sealed_blocks: int = _counter(
        "Blocks of offloaded layer groups that left the pool: their host copy was complete."
    )
    num_restored_groups: int = _counter("Layer groups that came back from host memory.")
    num_loaded_blocks: int = _counter("Blocks that came back by a copy from the host.")
    num_found_blocks: int = _counter("Blocks that came back without one: the pool still had them.")
    num_mirrored_blocks: int = _counter(
        "Blocks of resident layer groups that write-through copied to the host."
    )
    num_reclaimed_groups: int = _counter("Layer groups taken from requests that did not run.")
    num_dropped_copies: int = _counter("Parked requests that lost their host copies to others.")
    # Which requests run.
    num_pauses: int = _counter("Requests that were paused.")
    num_parks: int = _counter("Requests that were parked.")
    num_resumes_in_place: int = _counter("Paused requests that ran again.")
    # Back from the queue, or for the first time with a cached prefix.
    num_resumes_load: int = _counter("Requests whose KV was loaded before they ran.")
    num_resumes_recompute: int = _counter("Requests whose KV on the host was computed again.")
    num_resumes_host_resident: int = _counter("Requests that ran with their layers on the host.")
    num_overdue_holds: int = _counter(
        "Requests that ran again though their reader, stopped for too long, did not."
    )
    # The prefix cache.
    num_prefix_hits_load: int = _counter("Requests whose cached prefix was loaded before they ran.")
    num_prefix_hits_recompute: int = _counter("Requests whose cached prefix was computed again.")
    num_prefix_hits_host_resident: int = _counter(
        "Requests that ran with their cached prefix on the host."
    )
    num_prefix_hit_tokens: int = _counter(
        "Tokens with which requests came in that were cached, and not computed again."
    )
    num_published_columns: int = _counter("Blocks of all layers that others might begin with.")
    num_evicted_columns: int = _counter("Blocks of all layers that made room for others.")
    num_evicted_retained_columns: int = _counter(
        "Blocks of all layers that made room for others though they were to be kept."
    )
    num_evicted_awaited_columns: int = _counter(
        "Blocks of all layers that made room for others while their turn waited for a tool."
    )
    num_published_anchors: int = _counter(
        "Windows and states that others might begin with, behind blocks of all layers."
    )
    num_anchor_hits: int = _counter("Requests that began with such windows and states.")
    num_evicted_anchors: int = _counter("Such windows and states that made room for others.")
    num_kept_tool_turns: int = _counter(
        "Answers that ended with a tool call and whose KV was kept for the next turn."
    )
    num_returned_blocks: int = _counter(
        "Blocks of such turns that were copied back to the pool before the next one came."
    )
    num_late_blocks: int = _counter(
        "Blocks of what is kept that were copied to the host behind the end of their request."
    )
    num_retentions_accepted: int = _counter("Hints to keep a request's KV that were followed.")
    num_retentions_clipped: int = _counter("Hints that were followed as far as budgets go.")
    num_retentions_deferred: int = _counter("Hints about KV that was not on the host yet.")
    num_retentions_rejected: int = _counter("Hints that were not followed.")
    num_trunk_joins: int = _counter("Requests that began with what others had in the pool.")
    num_trunk_splits: int = _counter("Times that a part of a request's KV became shared.")
    # Copies that went wrong; what several ranks report of one step counts once.
    num_losses_failed: int = _counter("Times that a request's KV was lost because a copy failed.")
    num_losses_hung: int = _counter(
        "Times that a request's KV was lost because a copy did not end in time."
    )
    num_losses_corrupt: int = _counter(
        "Times that a request's KV was lost because other bytes came back."
    )
    num_recomputed_requests: int = _counter(
        "Times that a request was recomputed because its KV was lost."
    )
    num_given_up_requests: int = _counter(
        "Requests that ended with an error because of failed copies."
    )
    num_failed_saves: int = _counter(
        "Copies of a layer group to the host that failed and were made anew."
    )
    num_failed_restores: int = _counter(
        "Restores of a layer group that failed; it stayed on the host."
    )
    num_unmirrored_requests: int = _counter(
        "Requests that run without host copies after failed ones."
    )

    # A counter that is kept by way has a field for each, which ends with the way's value.

    def count_resume(self, way: ResumeWay) -> None:
        self._count(f"num_resumes_{way.value}")

    def count_prefix_hit(self, way: ResumeWay) -> None:
        self._count(f"num_prefix_hits_{way.value}")

    def count_retention(self, status: str) -> None:
        """Count the answer to a hint."""
        self._count(f"num_retentions_{status}")

    def num_resumes(self, way: ResumeWay) -> int:
        return self._number(f"num_resumes_{way.value}")

    def num_prefix_hits(self, way: ResumeWay) -> int:
        return self._number(f"num_prefix_hits_{way.value}")

    def _count(self, name: str) -> None:
        setattr(self, name, self._number(name) + 1)

    def _number(self, name: str) -> int:
        number: int = getattr(self, name)
        return number

    @property
    def num_failures(self) -> int:
        """A number that changes whenever a copy has gone wrong."""
        losses = self.num_losses_failed + self.num_losses_hung + self.num_losses_corrupt
        return losses + self.num_failed_saves + self.num_failed_restores

    def copy(self) -> "Counters":
        """Return the totals as of now."""
        return replace(self)

    def since(self, before: "Counters") -> dict[str, int]:
        """Return what has happened since a copy was made, without what has not."""
        old = asdict(before)
        return {name: n - old[name] for name, n in asdict(self).items() if n != old[name]}


TEXTS = {counter.name: str(counter.metadata["text"]) for counter in fields(Counters)}
