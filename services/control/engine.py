"""What the step loop and its parts need of an engine: vLLM's scheduler, or the simulator's.

All of it is called between two steps, on the engine's thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from services.control.kv import KVT
from services.control.measures.link_rate import LinkRate
from services.control.prefixes.anchors import ComingTurn
from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.shared_prefixes import Stretch
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import SchedulerRequest
from services.control.room.capacity_guard import Need
from services.control.types import Links
from services.placement.types import EngineShape

RequestT = TypeVar("RequestT", bound=SchedulerRequest)


class Engine(Protocol[RequestT, KVT]):
    """Requests, where their KV is, and what copies are under way."""

    @property
    def shape(self) -> EngineShape: ...

    # -- its requests ------------------------------------------------------------------------

    @property
    def records(self) -> Mapping[str, RequestRecord[KVT]]:
        """Records of all live requests, by id."""

    @property
    def running(self) -> Sequence[RequestT]:
        """Requests with a place in the batch, in scheduling order."""

    @property
    def waiting(self) -> Iterable[RequestT]:
        """The queue, in the engine's own order."""

    @property
    def live(self) -> Iterable[RequestT]:
        """All requests that have not ended, those with a place in the batch first."""

    @property
    def num_places(self) -> int:
        """Return how many more requests may run, >= 0."""

    def need_of(self, request: RequestT) -> Need[KVT]:
        """Return the room that a request takes, with tokens that are sampled and not yet known."""

    def park(self, record: RequestRecord[KVT]) -> None:
        """Send a running request to the queue; what is on the host stays there."""

    # -- their KV ----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Return the blocks of the pool that a plan may give away."""

    @property
    def num_write_through_blocks(self) -> int:
        """Return how many blocks a step copies to the host at most, ahead of need."""

    def num_predicted_slots(self, request: RequestT) -> int:
        """Return the host slots that a request is expected to take until its end."""

    def cached_prefix(self, request: RequestT) -> Sequence[Column]:
        """Return the columns that a request without KV may begin with: not its last token's."""

    def stretches(self, request: RequestT) -> Sequence[Stretch]:
        """Return what a request begins with that others may share, or will once it comes."""

    def coming_prefix(self, request: RequestT) -> Stretch | None:
        """Return what running requests compute that one without KV will begin with; None: nothing.

        It is what they have filled, and what their next steps will fill.
        """

    def coming_turn(self, request: RequestT) -> ComingTurn | None:
        """Return the turn before one without KV that is on its way to the host; None: none is."""

    def num_to_share(self, request: RequestT) -> int:
        """Return how many leading blocks of one in the queue others have, or will, in the pool."""

    def adopt_prefix(self, request: RequestT, columns: Sequence[Column]) -> None:
        """Let a request in the queue have these columns, as if it were parked."""

    # -- copies ------------------------------------------------------------------------------

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        """Return both directions at their measured rates, with what is queued now."""

    def num_returning_bytes(self) -> int:
        """Return what is queued on the way to the pool, behind what steps load."""

    def num_step_load_blocks(self, needs: Sequence[Need[KVT]]) -> int:
        """Return how many blocks a step loads once these requests are part of it."""
