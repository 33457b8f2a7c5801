"""The line: which requests are next, and how those in the queue come back.

While the run policy's decision is in force, the line is the part of the queue that it names, in its
order; else it is the whole queue. A request is moved on towards running while it is in the line:
one that is cached in part begins with that, and a parked one is brought back.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from services.control.engine import Engine, RequestT
from services.control.kv import KVT, only_shares
from services.control.measures.rates import Rates
from services.control.order.run_order import RunOrder
from services.control.requests.life import State
from services.control.room.capacity_guard import Need
from services.control.room.resumes import Resumes, num_host_tokens
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import LinkAndStep, ResumeWay
from services.placement.run.types import RunDecision


class Line(RunOrder[RequestT, KVT]):
    """Prepares the requests at the head of the queue."""

    def __init__(
        self,
        engine: Engine[RequestT, KVT],
        resumes: Resumes[KVT],
        rates: Callable[[], Rates],
    ) -> None:
        """`rates`: of the moment."""
        super().__init__(engine)
        self.resumes, self._rates = resumes, rates

    def obey(self, decision: RunDecision | None) -> None:
        super().obey(decision)
        if decision is not None:
            self.resumes.allow(decision.allowed_ways)

    def next_in_line(self) -> list[RequestT]:
        """Return the requests to make room for: those being prepared, and the first of the rest.

        None while as many run as may run: what they would take is the running requests' own.
        """
        line: list[RequestT] = []
        for request in self.eligible() if self.engine.num_places else ():
            line.append(request)
            if not self.record_of(request).is_prepared:
                break
        return line

    def num_host_tokens(self, request: RequestT) -> int | None:
        """Return how many tokens a request need not compute; None: it is passed over now."""
        record = self.record_of(request)
        if record.is_held or self._is_coming(request):
            return None
        self._seek(request)
        if record.kv is None and self.resumes.is_short_of_blocks:
            return None  # no request overtakes one that has yet to find room
        return num_host_tokens(record)

    # -- room --------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Let the capacity guard make room for the next step and the next admission."""
        line = [
            self.engine.need_of(one)._replace(num_to_share=self.engine.num_to_share(one))
            for one in self.next_in_line()
        ]
        self.resumes.guard.adjust(self.active_needs(), line)

    # -- coming back -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Move the requests at the head of the line on towards running."""
        self.resumes.is_short_of_blocks = False
        line = list(islice(self.eligible(), self.engine.num_places))
        ahead = self.active_needs() if line else []  # served before the request at hand
        for request in line:
            if self._is_coming(request):
                if self._awaits_turn(request):  # others need not
                    continue
                break
            record = self.record_of(request)
            self._seek(request)
            self.resumes.prepare(
                record,
                partial(self._choose, request, tuple(ahead)),
                num_slots=self.engine.num_predicted_slots(request),
                num_kept_free=self.resumes.guard.num_blocks_of_next_step(ahead),
            )
            if self.resumes.is_short_of_blocks or record.kv is None:
                break
            ahead.append(self.engine.need_of(request))

    def put_back_last(self, requests: Iterable[RequestT]) -> None:
        """Take back the blocks of the last of these that has some: those ahead lack them."""
        preparing = [one for one in map(self.record_of, requests) if one.is_prepared]
        for record in reversed(preparing):
            if self.resumes.put_back(record):
                return

    def _is_coming(self, request: RequestT) -> bool:
        """Return whether a request shall wait for what others compute: twins are no use."""
        record = self.record_of(request)
        has_begun = record.way is not None if record.kv is None else not only_shares(record.kv)
        if has_begun:
            return False
        return self.engine.coming_prefix(request) is not None or self._awaits_turn(request)

    def _awaits_turn(self, request: RequestT) -> bool:
        """Return whether the turn before it is on the host sooner than it would be computed.

        That is work in steps which all that run take part in.
        """
        turn = self.engine.coming_turn(request)
        if turn is None:
            return False
        rates = self._rates()
        if not rates.d2h_bytes_per_s or rates.prompt is None:
            return True
        copy_s = turn.num_blocks * self.resumes.block_bytes / rates.d2h_bytes_per_s
        first, end = turn.num_tokens - turn.num_more, turn.num_tokens
        return copy_s <= (len(self.active_needs()) + 1) * rates.prompt.seconds(first, end)

    def _seek(self, request: RequestT) -> None:
        """Let a request without KV begin with what is cached of its tokens.

        As late as possible: others may still be computing what it begins with. So a request that
        has nothing but what it shares looks again.
        """
        record = self.record_of(request)
        if record.kv is not None and record.state is State.READY and only_shares(record.kv):
            if len(self.engine.cached_prefix(request)) <= record.num_begun:
                return
            self.resumes.begin_anew(record)
        if columns := self.cached_prefix(request):
            record.num_begun = len(columns)
            self.engine.adopt_prefix(request, columns)

    def _choose(
        self, request: RequestT, ahead: Sequence[Need[KVT]], kv: KVT
    ) -> tuple[ResumeWay, LayerPlacement]:
        rates, block_bytes = self._rates(), self.resumes.block_bytes
        engine = LinkAndStep(
            h2d_bytes_per_s=rates.h2d_bytes_per_s,
            prompt=rates.prompt,
            step_s=rates.step_s or 0.0,
            step_bytes=self.engine.num_step_load_blocks(ahead) * block_bytes,
            queue_bytes=self.engine.num_returning_bytes(),
            num_running=len(ahead),
        )
        need = self.engine.need_of(request)
        num_left = request.max_tokens - request.num_output_tokens
        return self.resumes.choose(kv, need, ahead, num_left=num_left, engine=engine)
