"""A live request: progress, KV, reader."""

from collections import deque
from dataclasses import dataclass, field

from services.pacing.deposit import ReaderModel, release_interval_s
from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId, RequestPhase
from simulator.blocks import Occupancy, num_owned_blocks
from simulator.copies import CopyJob
from simulator.workload import ArrivingRequest


@dataclass(slots=True, kw_only=True)
class KVState:
    """Where a request's KV is. All groups are mirrored alike: one count of host blocks."""

    geometry: BlockGeometry
    num_tokens: int = 0  # that have a place in the pool or on the host
    offloaded: tuple[int, ...] = ()  # layer groups, ascending
    num_buffers: int = 0  # staging buffers; 0 iff nothing is offloaded
    asleep: bool = False  # not scheduled, its staging has been reclaimed
    mirrored: bool = False  # has room on the host
    num_host_blocks: int = 0  # per group, complete copies
    num_sent_blocks: int = 0  # per group, copies ordered
    saves: deque[tuple[CopyJob, int]] = field(default_factory=deque)  # and the host blocks after
    restoring: dict[int, CopyJob] = field(default_factory=dict)  # by group
    wanted: frozenset[int] | None = None  # offloaded by the plan in force; None: no plan
    wanted_buffers: int = 0  # staging buffers by the plan in force

    @property
    def num_full_blocks(self) -> int:
        """Full blocks per group."""
        return self.num_tokens // self.geometry.block_size

    @property
    def num_late_blocks(self) -> int:
        """Pool blocks that leave as soon as their copies are complete."""
        return len(self.offloaded) * max(0, self.num_full_blocks - self.num_host_blocks)

    def num_owned(
        self,
        *,
        num_tokens: int | None = None,
        num_offloaded: int | None = None,
        num_buffers: int | None = None,
        awake: bool = False,
    ) -> int:
        """Return the pool blocks of this state, or of one that differs in what is given."""
        offloaded = len(self.offloaded) if num_offloaded is None else num_offloaded
        buffers = self.num_buffers if num_buffers is None else num_buffers
        if self.asleep and not awake:
            buffers = 0
        return num_owned_blocks(
            self.geometry,
            Occupancy(
                num_tokens=self.num_tokens if num_tokens is None else num_tokens,
                num_offloaded=offloaded,
                num_buffers=buffers,
                num_host_blocks=self.num_host_blocks,
                num_restoring=len(self.restoring),
            ),
        )

    def take_in_saves(self) -> bool:
        """Count copies to the host that are complete; return whether there are any."""
        before = self.num_host_blocks
        while self.saves and self.saves[0][0].done_s is not None:
            self.num_host_blocks = self.saves.popleft()[1]
        return self.num_host_blocks > before

    def take_in_restores(self) -> bool:
        """Flip the groups whose KV is back; return whether there are any."""
        back = [group for group, job in self.restoring.items() if job.done_s is not None]
        for group in back:
            del self.restoring[group]
        if back:
            self.offloaded = tuple(group for group in self.offloaded if group not in back)
            as_planned = self.wanted == frozenset(self.offloaded)
            buffers = self.wanted_buffers if as_planned else self.num_buffers
            self.num_buffers = min(self.num_buffers, buffers, len(self.offloaded))
        return bool(back)

    def cancel_copies(self) -> None:
        """Let no copy begin any more."""
        for job in [*self.restoring.values(), *(job for job, _ in self.saves)]:
            job.cancelled = True
        self.restoring.clear()
        self.saves.clear()


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One request from its arrival to its end. Instants are of virtual time."""

    spec: ArrivingRequest
    kv: KVState
    reader: ReaderModel
    phase: RequestPhase = RequestPhase.WAITING
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    generated_s: list[float] = field(default_factory=list)
    paused_s: float | None = None  # beginning of the running pause
    resumed_s: float | None = None
    num_pauses: int = 0
    pause_endable_noted: bool = False
    pauses_s: list[tuple[float, float]] = field(default_factory=list)  # complete ones
    decode_steps_s: list[float] = field(default_factory=list)  # see `Outcome`
    preempted_s: float | None = None
    num_preemptions: int = 0
    last_scheduled_s: float | None = None
    caught_up: bool = False  # its host copy was complete once since its prompt was

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.spec.num_prompt_tokens + self.num_output_tokens

    @property
    def num_left_tokens(self) -> int:
        """Tokens known and not computed: 1 for a request that decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_paused(self) -> bool:
        return self.phase is RequestPhase.PAUSED

    @property
    def is_finished(self) -> bool:
        return self.num_output_tokens >= self.spec.num_output_tokens

    def computed(self, num_tokens: int) -> None:
        """Take in that the step under way computes so many tokens."""
        self.num_computed_tokens += num_tokens
        left = self.num_left_tokens
        self.phase = RequestPhase.PREFILL if left else RequestPhase.DECODING

    def step_ended(self, now_s: float) -> bool:
        """Take in a step it was part of; return whether it brought a token."""
        if self.num_left_tokens:
            return False
        self.num_output_tokens += 1
        self.generated_s.append(now_s)
        self.reader.generated(now_s)
        return True

    def pause(self, now_s: float) -> None:
        self.phase, self.paused_s = RequestPhase.PAUSED, now_s
        self.num_pauses += 1
        self.pause_endable_noted = False

    def resume(self, now_s: float) -> None:
        assert self.paused_s is not None
        self.pauses_s.append((self.paused_s, now_s))
        self.paused_s, self.resumed_s = None, now_s
        decodes = self.num_left_tokens <= 1 and self.num_output_tokens > 0
        self.phase = RequestPhase.DECODING if decodes else RequestPhase.PREFILL

    def preempt(self, now_s: float) -> None:
        """Lose turn and blocks; everything is computed again."""
        if self.is_paused:
            self.resume(now_s)
        self.kv.cancel_copies()
        self.kv = KVState(geometry=self.kv.geometry)
        self.phase, self.preempted_s = RequestPhase.PREEMPTED, now_s
        self.num_computed_tokens, self.caught_up = 0, False
        self.num_preemptions += 1


def live_request(spec: ArrivingRequest, geometry: BlockGeometry) -> LiveRequest:
    """Return a request that has just arrived."""
    return LiveRequest(
        spec=spec,
        kv=KVState(geometry=geometry),
        reader=ReaderModel(release_interval_s(spec.level)),
    )
