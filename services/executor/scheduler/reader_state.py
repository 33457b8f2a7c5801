"""What a scheduler keeps of its requests' readers, and what it shows to a client that watches."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, takewhile
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from services.control.measures.step_clock import StepClock
from services.control.requests.life import Hold, State
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import phase_of
from services.control.step_loop import StepLoop
from services.executor import kv_holders
from services.executor.blocks.holder import GroupKV
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.engine import engine_calls
from services.executor.engine.parent_watch import end_with_parent
from services.executor.kv_holders import HoldingRequest, HoldingSession, KVHolders, KVUse
from services.executor.observation import (
    EngineObservation,
    GroupPlace,
    PrefixObservation,
    RequestObservation,
    to_plain,
)
from services.executor.prompts.form_progress import advance
from services.executor.request_tag import (
    Begun,
    begun_of,
    fairness_id_of,
    from_extra_args,
    reads_from_first,
    to_transfer_params,
)
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.pacing.cause import Cause
from services.pacing.request_buffer import RequestBuffer
from services.pacing.step_times import StepTimes
from services.pacing.token_time import Step

engine_calls.install()

NUM_GRAMMAR_THREADS = 4


class ReaderStateMixin(VllmScheduler):
    """Over any of vLLM's schedulers: a `RequestRecord` per request, from arrival to end."""

    loop: StepLoop | None = None  # decides between steps; None: nothing is decided
    predicted_step_s: float | None = None  # of the newest step, by whoever predicts it
    stall_s = 0.0  # of the newest step: layers waited for copies
    stalled_by = Cause.COPIES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.records: dict[str, RequestRecord[RequestKV]] = {}
        self.step_clock = StepClock()
        self._step_times = StepTimes()
        # vLLM's own are half as many as there are processors: a form waits for a slow one to end.
        if hasattr(self.structured_output_manager, "executor"):
            self.structured_output_manager.executor = ThreadPoolExecutor(NUM_GRAMMAR_THREADS)
        end_with_parent()

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        extra_args = params and params.extra_args
        level, reads = from_extra_args(extra_args), reads_from_first(extra_args)
        begun, now_s = begun_of(extra_args), time.monotonic()
        if begun is not None:
            request.arrival_time = time.time() - (now_s - begun.arrived_s)
        arrival_s = now_s - max(0.0, time.time() - request.arrival_time)
        record: RequestRecord[RequestKV] = RequestRecord(
            request_id=request.request_id,
            buffer=RequestBuffer(level, arrived_s=arrival_s, reads=reads),
            arrival_s=arrival_s,
            priority=request.priority,
            fairness_id=fairness_id_of(extra_args),
        )
        self.records.setdefault(request.request_id, record)
        if begun is not None:
            self._begin_with(begun, request, record)
        super().add_request(request)

    def _begin_with(self, begun: Begun, request: Request, record: RequestRecord[RequestKV]) -> None:
        """Let a request that arrives have what it was begun with elsewhere, as its output.

        It counts as preempted, which is what it is: vLLM then takes what is cached of its output
        for its own, where that of a new request must end within its prompt.
        """
        request.append_output_token_ids(begun.output_ids)
        request.num_preemptions = 1
        num_known, now_s = len(begun.output_ids), time.monotonic()
        record.buffer.resumed(
            num_known,
            num_delivered=begun.num_delivered_tokens,
            last_due_s=begun.last_due_s,
            now_s=now_s,
        )
        first_due_s = begun.last_due_s - (num_known - 1) * record.buffer.interval_s
        record.first_token_s = min(now_s, first_due_s)
        record.num_counted_tokens = num_known

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Say whether a waiting request may run; move its form on once that is compiled."""
        status = request.status
        is_compiling = status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):
            return False
        if request.status != status and not self.records[request.request_id].has_run:
            request.status = RequestStatus.WAITING  # workers do not know it, whatever it has
        form = request.structured_output_request
        if not is_compiling or advance(
            self.structured_output_manager, request, request.output_token_ids
        ):
            return True
        # To vLLM it is one whose form does not compile, and ends as such.
        request.status, form.grammar = status, ValueError("the form does not allow the answer")
        return bool(super()._handle_blocked_waiting_request(request))

    def _admitted(self, output: SchedulerOutput) -> list[Request]:
        """Return the requests that run now, and did not in the step before."""
        new = (request.req_id for request in output.scheduled_new_reqs)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in resumed:
            num_before = self.requests[name].num_computed_tokens - output.num_scheduled_tokens[name]
            self.records[name].came_back(num_before)
        return [self.requests[name] for name in (*resumed, *new)]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        num_computed_tokens = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        self.records[request.request_id].preempted(num_computed_tokens)
        request.next_decode_eligible_step = 0  # if it was skipped

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)
        del self.records[request.request_id]
        return freed

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        now_s = time.monotonic()
        self.step_clock.begin(now_s)
        self._let_rest(now_s)
        return super().schedule(*args, **kwargs)

    def _let_rest(self, now_s: float) -> None:
        """Hold requests whose readers have enough in hand, from the next step on, and let those go
        on whose readers do not any more.
        """
        for record in self.records.values():
            if record.buffer.service_level.max_in_hand_s is None:
                continue
            rests = Hold.REST in record.holds
            if record.buffer.has_enough(now_s, rests=rests) is not rests:
                (record.release if rests else record.hold)(Hold.REST, now_s)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        # Some requests end with this step.
        buffers = {name: record.buffer for name, record in self.records.items()}
        outputs = super().update_from_output(scheduler_output, *args)
        now_s = time.monotonic()
        scheduled = scheduler_output.num_scheduled_tokens
        step = Step(
            begin_s=self.step_clock.end(now_s, ran=bool(scheduled)),
            end_s=now_s,
            num_scheduled=scheduled,
            stall_s=self.stall_s,
            stalled_by=self.stalled_by,
        )
        self._step_times.ended(step, buffers, self._why_away)
        for output in chain.from_iterable(one.outputs for one in outputs.values()):
            self._note_tokens(output, buffers.get(output.request_id), now_s)
        return outputs

    def _note_tokens(
        self, output: EngineCoreOutput, buffer: RequestBuffer | None, now_s: float
    ) -> None:
        """Take in what a step added to a request, and say in its output why that is late, and what
        is kept.
        """
        num_new = len(output.new_token_ids)
        if buffer is None or not num_new:
            return
        delay = buffer.generated(buffer.num_generated + num_new, now_s)
        told = self._kept_by(output.request_id, now_s)
        if delay is not None:
            told |= to_transfer_params(delay)
        if told:
            output.kv_transfer_params = told

    def _kept_by(self, request_id: str, now_s: float) -> dict[str, Any]:
        """Return what an output is to say of the KV that is kept of its request."""
        return {}

    def keep_turns(self, turns: dict[str, float]) -> None:
        """Keep the KV of requests that end with tool calls for so many seconds, by the engine's
        request ids.
        """

    def release_session(self, account: str, session_id: str) -> int:
        """Keep nothing for an account's session any more; return the tokens that were."""
        return 0

    def _why_away(self, request_id: str) -> Cause | None:
        """Return what keeps a request from being part of steps; None if nothing does."""
        record = self.records.get(request_id)
        if record is None:
            return None
        if record.buffer.on_hold:
            return Cause.READER
        is_preempted = self.requests[request_id].status == RequestStatus.PREEMPTED
        return Cause.PAUSE if is_preempted or record.is_held else None

    def deliver(self, counts: dict[str, tuple[int, float]]) -> None:
        """Take over how many tokens each reader had at some instant, by the engine's request ids.

        Instants are of `time.monotonic()`, which all processes of a machine share: a count has
        been under way for up to an interval of the relay and a step, in which its reader read on.
        Ids of requests that are gone or were never here are ignored.
        """
        for request_id, (num_delivered, counted_s) in counts.items():
            record = self.records.get(request_id)
            if record is not None:
                record.buffer.deliver(num_delivered, counted_s)

    def turn(self, turns: dict[str, tuple[int, bool]]) -> None:
        """Take over from which token on each answer is read, or is not, by the engine's ids: where
        thoughts end and text begins, or a call does. Ids of requests that are gone are ignored.
        """
        now_s = time.monotonic()
        for request_id, (index, reads) in turns.items():
            record = self.records.get(request_id)
            if record is not None:
                record.buffer.turned(index, reads=reads, now_s=now_s)

    def hold(self, holds: dict[str, bool]) -> None:
        """Hold requests whose readers have stopped, or let them go on; by the engine's ids.

        Ids of requests that are gone or were never here are ignored.
        """
        now_s = time.monotonic()
        for request_id, held in holds.items():
            record = self.records.get(request_id)
            if record is not None:
                record.buffer.on_hold = held
                (record.hold if held else record.release)(Hold.READER, now_s)

    def repace(self, paces: dict[str, dict[str, Any]]) -> None:
        """Take over what requests are promised from now on, as `to_extra_args` packs it; by the
        engine's ids. Ids of requests that are gone are ignored.
        """
        now_s = time.monotonic()
        for request_id, packed in paces.items():
            record = self.records.get(request_id)
            if record is not None:
                record.buffer.repace(from_extra_args(packed), now_s)

    @property
    def num_cached_tokens(self) -> int:
        """Return the tokens whose KV is on the host, for requests that begin with them."""
        return 0

    @property
    def trunks(self) -> Iterable[Trunk]:
        """Return what requests share."""
        return ()

    @property
    def host_use(self) -> dict[str, Any]:
        """Return what an `EngineObservation` says of the host's memory and the link to it."""
        return {}

    @property
    def tokens_per_step(self) -> float | None:
        """Return how many tokens a step brings a request that decodes; None: nothing drafts."""
        if self.loop is None or not self.num_spec_tokens:
            return None
        return self.loop.ledger.tokens_per_step.mean

    def observe(self) -> dict[str, Any]:
        """Return an `EngineObservation` as plain data."""
        now_s = time.monotonic()
        pool: Any = self.kv_cache_manager.block_pool
        return to_plain(
            EngineObservation(
                requests=tuple(
                    self._observe_request(self.requests[request_id], record, now_s)
                    for request_id, record in self.records.items()
                ),
                num_steps=self.step_clock.num_steps,
                observed_step_s=self.step_clock.last_step_s,
                predicted_step_s=self.predicted_step_s,
                num_pool_blocks=pool.num_gpu_blocks - 1,  # one is vLLM's null block
                num_free_pool_blocks=pool.get_num_free_blocks(),
                num_cached_tokens=self.num_cached_tokens,
                prefixes=tuple(map(_observe_trunk, self.trunks)),
                tokens_per_step=self.tokens_per_step,
                **self.host_use,
            )
        )

    def _observe_request(
        self, request: Request, record: RequestRecord[RequestKV], now_s: float
    ) -> RequestObservation:
        buffer = record.buffer
        groups = [] if record.kv is None else record.kv.groups
        return RequestObservation(
            request_id=request.request_id,
            phase=phase_of(request, record),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_generated_tokens=buffer.num_generated,
            num_delivered_tokens=buffer.num_delivered,
            num_deposited_tokens=buffer.num_deposited(now_s),
            num_late_tokens=buffer.num_late,
            interval_s=buffer.interval_s,
            late_cause=buffer.late_cause,
            pace_tail=buffer.service_level.pace_tail,
            why=record.why,
            residency=residency_of(groups),
        )

    def kv_holders(self, max_sessions: int) -> dict[str, Any]:
        """Return `KVHolders` as plain data."""
        now_s = time.monotonic()
        sessions, num_sessions = self._holding_sessions(max_sessions, now_s)
        requests = (
            self._holding(self.requests[request_id], record, now_s)
            for request_id, record in self.records.items()
        )
        return kv_holders.to_plain(
            KVHolders(requests=tuple(requests), sessions=tuple(sessions), num_sessions=num_sessions)
        )

    def _holding_sessions(self, limit: int, now_s: float) -> tuple[list[HoldingSession], int]:
        """Return what is kept for sessions, most first, and for how many of them."""
        return [], 0

    def _holding(
        self, request: Request, record: RequestRecord[RequestKV], now_s: float
    ) -> HoldingRequest:
        waits = record.state is not State.RUNNING and not record.holds
        return HoldingRequest(
            request_id=request.request_id,
            phase=phase_of(request, record),
            priority=record.priority,
            why=record.why,
            waited_s=max(0.0, record.away_s(now_s)) if waits else 0.0,
            num_recomputed_tokens=record.num_recomputed_tokens,
            use=self._use_of_whole(request) if record.kv is None else record.kv.use,
        )

    def _use_of_whole(self, request: Request) -> KVUse:
        """Return where the KV of a request is that vLLM keeps whole; without blocks it is nowhere.
        Of groups of several kinds the first tells what is shared.
        """
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        if not blocks:
            return KVUse()
        num_shared = sum(1 for _ in takewhile(lambda block: block.ref_cnt > 1, blocks))
        num_shared_tokens = min(num_shared * self.block_size, request.num_computed_tokens)
        return KVUse(
            num_pool_tokens=request.num_computed_tokens - num_shared_tokens,
            num_shared_tokens=num_shared_tokens,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every live request has a record, and none besides."""
        strays = self.records.keys() ^ self.requests.keys()
        assert not strays, f"requests without records, or records without: {sorted(strays)}"


def _observe_trunk(trunk: Trunk) -> PrefixObservation:
    return PrefixObservation(
        request_ids=tuple(user.request_id for user in trunk.users),
        num_tokens=trunk.num_own_tokens,
        residency=residency_of(trunk.groups),
    )


def residency_of(groups: Iterable[GroupKV]) -> str:
    """Return a `GroupPlace` value per layer group."""
    return "".join(_place_of(group).value for group in groups)


def _place_of(group: GroupKV) -> GroupPlace:
    if group.restore is not None:
        return GroupPlace.RESTORING
    return GroupPlace.OFFLOADED if group.offloaded else GroupPlace.RESIDENT
