"""vLLM's schedulers with layer-wise KV and the closed loop: `schedule` is a whole step.

Named by `scheduler_cls`. Everything that a plan changes is decided here, in the EngineCore process,
and travels with the step, so that all ranks do the same.
"""

import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import structlog
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from services.control.admission import run_policy_of
from services.control.measures.link_rate import LinkRate
from services.control.measures.rates import Rates, write_budget_blocks
from services.control.options import ControllerOptions
from services.control.order.line import Line
from services.control.plans.planner import Planner
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import CapacityGuard, Need
from services.control.room.resumes import Resumes
from services.control.step_loop import StepLoop
from services.control.types import Trigger
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.transfers.losses import Losses
from services.executor.blocks.transfers.moves import BlockMoves
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.kv_options import (
    KVOptions,
    caches_prefixes,
    check_supported,
    computes_prompts_whole,
)
from services.executor.plugin.connector import LayerwiseConnector
from services.executor.scheduler.coordinator import LayerwiseCoordinator
from services.executor.scheduler.engine_requests import told_length
from services.executor.scheduler.line_control import LineControl
from services.executor.scheduler.planner_client import planner_of
from services.executor.scheduler.reader_state import ReaderStateMixin
from services.executor.scheduler.recovery import Recovery, error_output, share_nothing
from services.executor.scheduler.retaining import Retaining
from services.executor.scheduler.side_coordinator import SideCoordinator
from services.executor.scheduler.step_watch import StepWatch
from services.executor.scheduler.vllm_engine import VllmEngine, engine_shape
from services.executor.sizing import are_slots_ready_at_start, block_geometry, num_host_slots
from services.executor.stats.kv_stats import KVStats
from services.executor.step_messages import StepFeedback
from services.kit.telemetry import log as logging
from services.pacing.cause import Cause
from services.placement.blocks import BlockGeometry
from services.placement.presets import Run

log = structlog.get_logger()

STEPS_PER_STATS = 32  # of the loop's counts


class LayerwiseSchedulerMixin(ReaderStateMixin):
    """Owns the KV blocks of all requests, layer group by layer group."""

    loop: StepLoop

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if multiprocessing.parent_process() is not None:
            logging.configure("executor-engine", "info")
        config, manager = self.vllm_config, self.kv_cache_manager
        options = KVOptions.of(config)
        self.kv_options = options = replace(options, prefix_caching=caches_prefixes(config))
        check_supported(config)
        self._computes_prompts_whole = computes_prompts_whole(config)
        geometry = block_geometry(config, manager.kv_cache_config)
        kind = SideCoordinator if geometry.side_windows else LayerwiseCoordinator
        self._coordinator = kind.install(manager, max_in_flight_tokens=config.max_in_flight_tokens)
        self.block_owner = owner = self._make_owner(manager, geometry)
        shape = engine_shape(
            config,
            manager.kv_cache_config,
            num_blocks=owner.pool.num_gpu_blocks - 1,  # one is vLLM's null block
            num_host_blocks=owner.host.num_ready,
        )
        self.transfers = Transfers(
            owner,
            num_ranks=config.parallel_config.world_size,
            write_budget=self._write_budget,
        )
        moves = BlockMoves(owner, self.transfers, overlap=options.overlap_load_evict)
        self.capacity_guard = CapacityGuard(
            moves,
            self.records,
            owner.counters,
            max_staging=options.max_staging_buffers,
            restore_when_free_frac=options.restore_when_free_frac,
        )
        resumes = Resumes(moves, self.capacity_guard, owner.counters, block_bytes=shape.block_bytes)
        self.engine = VllmEngine(self, self.transfers, self.capacity_guard, shape)
        self.line: Line[Request, RequestKV] = Line(self.engine, resumes, self._rates)
        self.control = LineControl(self, self.line, self.transfers, max_hold_s=options.max_pause_s)
        self.recovery = Recovery(self, owner, Losses(owner, self.transfers))
        self.retaining = Retaining(self.transfers, self.kv_options)
        self._coordinator.owner, self._coordinator.draft = owner, self._draft
        self._coordinator.num_accepted = self._num_accepted
        if isinstance(self._coordinator, SideCoordinator):
            owner.blocks.notes_open = self.needs_kv_cache_zeroing
            self._coordinator.begin(self.transfers.turn_ends, config)
        self._connect(manager)
        controller_options = ControllerOptions.of(config)
        self.set_up(controller_options, planner_of(controller_options))

    def _connect(self, manager: Any) -> None:
        connector = self.connector
        assert isinstance(connector, LayerwiseConnector)
        connector.transfers = self.transfers
        connector.limit_host = self._limit_host
        connector.relieve = self.capacity_guard.relieve
        connector.num_host_tokens = self.line.num_host_tokens
        connector.num_accepted = self._num_accepted
        connector.bind_kv_cache_manager(manager)

    def set_up(
        self, options: ControllerOptions, planner: Planner | None, policy: Run | None = None
    ) -> None:
        """Start with a loop that knows nothing. There may be no requests.

        `policy`: run policy in place of the options'.
        """
        assert not self.requests
        self._watch, self._num_steps_unreported = StepWatch(self.records), 0
        if policy is None:
            policy = run_policy_of(options)
        self.loop = StepLoop(options, self.line, planner, policy, time.monotonic)

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        return self.block_owner.blocks.take_open_ids() or None

    def _make_owner(self, manager: Any, geometry: BlockGeometry) -> BlockOwner:
        num_slots = num_host_slots(self.vllm_config, manager.kv_cache_config)
        owner = BlockOwner(
            manager.block_pool,
            HostPool(num_slots, num_ready=None if are_slots_ready_at_start(self.kv_options) else 0),
            geometry,
            self.records,
            poison_freed=self.kv_options.poison,
        )
        self._check_room(owner, num_slots)
        return owner

    def _limit_host(self, num_slots: int) -> None:
        """Use no more host slots than every rank has; ValueError if that is too few."""
        self._check_room(self.block_owner, num_slots)
        host, num_pool_blocks = self.block_owner.host, self.block_owner.pool.num_gpu_blocks - 1
        host.limit(num_slots)
        sizes = {"slots": host.num_slots, "pool_blocks": num_pool_blocks}
        if 0 < host.num_slots < num_pool_blocks:
            log.warning("host_smaller_than_pool", **sizes)
        else:
            log.info("host_room", **sizes)

    def _check_room(self, owner: BlockOwner, num_slots: int) -> None:
        """Raise ValueError if a request of the maximum length would never find room."""
        most = owner.geometry.num_groups * (self.max_model_len // owner.geometry.block_size)
        if num_slots < most and most > owner.pool.num_gpu_blocks - 1:
            raise ValueError(
                f"host_bytes={self.kv_options.host_bytes} holds {num_slots} blocks; a request of "
                f"max_model_len={self.max_model_len} that does not fit the pool needs {most}"
            )

    def describe(self) -> dict[str, Any]:
        """Return the engine's shape with all of the host's slots, in plain data, what the host
        holds, in tokens, a token's bytes, and the idle link's rate.
        """
        num_slots = self.block_owner.host.num_slots
        shape = replace(self.engine.shape, num_host_blocks=num_slots)
        links = self.connector.calibration
        rate = LinkRate()
        if links is not None:
            rate.calibrate(links.small_h2d, links.large_h2d)
        tokens_per_block = shape.block_size / shape.num_groups
        return {
            "shape": asdict(shape),
            "num_host_tokens": int(num_slots * tokens_per_block),
            "token_bytes": int(shape.block_bytes / tokens_per_block),
            "link_bytes_per_s": rate.bytes_per_s or 0.0,
        }

    # -- each step --------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.retaining.advance(time.monotonic(), is_wanted=self.engine.wants_all)
        self.loop.before_schedule()  # plans that came, pauses that end, which requests may run
        self.transfers.settle()  # copies that are complete
        self._coordinator.discard_drafts()
        self.control.stop_and_start()  # requests that are held, those that are ready to leave
        self.adjust_placements()  # room for the step and for the next in line
        self.line.prepare()
        with self.control.admitting():  # the line alone
            output = super().schedule(*args, **kwargs)  # vLLM's, asking for blocks
        self.control.admitted(self._admitted(output), output.num_scheduled_tokens)
        self.control.after_step(num_scheduled=output.total_num_scheduled_tokens)
        # Otherwise vLLM would call the connector after the layers have run.
        output.has_sync_kv_loads = True
        self._report(output)  # a question to the planner, if there is a reason
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a request may come in now.

        vLLM does not heed the connector's "not now" where a prompt must be computed whole.
        """
        whole = request.skip_reading_prefix_cache
        if whole and self.line.num_host_tokens(request) is None:
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def adjust_placements(self) -> None:
        """Let the capacity guard make room for the next step and the next admission."""
        self.line.make_room()

    def _report(self, output: SchedulerOutput) -> None:
        """Tell the loop of a step as it leaves."""
        since_s = time.monotonic()
        step = self._watch.scheduled(output, self.loop.begun_s)
        self.loop.note(*self._watch.progress(output, self.running))
        self.loop.after_schedule(step, since_s)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        transferred = model_runner_output.kv_connector_output
        meta = transferred and transferred.kv_connector_worker_meta
        feedback = meta if isinstance(meta, StepFeedback) else None
        given_up: list[Request] = []
        if feedback is not None:
            given_up = self.recovery.recover(feedback)
            self.transfers.absorb(feedback)  # before requests end whose copies are complete now
        self.stall_s = 0.0 if feedback is None else feedback.timing.stall_s
        self.stalled_by = Cause.PLANNER if self.loop.planning.lacks_plan else Cause.COPIES
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for request in given_up:
            to_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            to_client.outputs.append(error_output(request))
        if feedback is not None:
            self._watch.ended(feedback)
        timing = None if feedback is None else feedback.timing
        self.loop.after_update(timing, busy=self.has_requests())
        self.predicted_step_s = self.loop.meter.predicted_step_s
        return outputs

    def _rates(self) -> Rates:
        return self.loop.meter.rates()

    def _write_budget(self, num_under_way: int) -> int:
        return write_budget_blocks(
            self._rates(),
            block_bytes=self.engine.shape.block_bytes,
            max_blocks=self.kv_options.max_mirrored_blocks_per_step,
            num_under_way=num_under_way,
        )

    # -- a request's life -------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        # vLLM hashes the blocks of every request wherever there is a connector.
        if not self.kv_options.prefix_caching:
            share_nothing(request)
        self._coordinator.arrives(request)
        super().add_request(request)
        self.loop.changed()

    def has_requests(self) -> bool:
        """Return whether there are steps to run: what has ended may still have to be copied."""
        return bool(super().has_requests()) or self.transfers.needs_steps

    def _draft(self, record: RequestRecord[RequestKV], num_tokens: int) -> RequestKV:
        """Draft a request that asks for its first blocks."""
        request = self.requests[record.request_id]
        need = Need(record, max(num_tokens, request.num_tokens))
        placement = self.capacity_guard.place_new(need, self.line.active_needs())
        num_slots, keys = self.engine.num_predicted_slots(request), request.block_hashes
        return self.block_owner.draft(record, placement, num_slots=num_slots, keys=keys)

    def _num_accepted(self, request_id: str, num_tokens: int) -> int:
        """Return how many of a request's tokens after a step cannot be rejected any more.

        `num_tokens`: all of them, with drafts. Each step in flight gives one token at least.
        """
        if not self.num_spec_tokens:
            return num_tokens
        request = self.requests[request_id]
        in_flight = request.num_output_placeholders > 0
        return int(min(num_tokens, request.num_tokens + in_flight))

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """Keep the host copies, unless tokens that are under way will be drawn anew.

        Nor does a request keep them whose prompt must be computed whole, for its log-probabilities
        or because attention can do no other.
        """
        begins_anew = (
            drop_stale_output or request.skip_reading_prefix_cache or self._computes_prompts_whole
        )
        with self._coordinator.keeping(None if begins_anew else request.request_id):
            super()._preempt_request(request, timestamp, drop_stale_output)
        self.loop.note(Trigger.PREEMPTED)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Let no request begin with what was computed until now, nor with what follows from it."""
        self.retaining.forget_all()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.loop.ended(num_output_tokens=told_length(request))
        self.retaining.ended(request, time.monotonic())  # while its columns are there
        self._coordinator.ends(request)
        return super()._free_request(request, *args, **kwargs)

    # -- what others see --------------------------------------------------------------------

    def _kept_by(self, request_id: str, now_s: float) -> dict[str, Any]:
        if (request := self.requests.get(request_id)) is None:
            return self.retaining.told(request_id)
        return self.retaining.begun(request, now_s)

    def keep_turns(self, turns: dict[str, float]) -> None:
        self.retaining.keep_turns(turns, self.requests, time.monotonic())

    def release_session(self, account: str, session_id: str) -> int:
        return self.retaining.release(account, session_id)

    def _holding_sessions(self, limit: int, now_s: float) -> tuple[list[Any], int]:
        return self.retaining.sessions(limit, now_s), self.retaining.num_sessions

    @property
    def num_cached_tokens(self) -> int:
        return self.block_owner.host.cache.num_columns * self.block_owner.geometry.block_size

    @property
    def host_use(self) -> dict[str, Any]:
        return {
            "num_host_blocks": self.block_owner.host.num_ready,
            "num_free_host_blocks": self.block_owner.host.num_free,
            "link_bytes_per_s": self.loop.meter.rates().h2d_bytes_per_s,
        }

    @property
    def trunks(self) -> Iterable[Trunk]:
        return self.block_owner.trunks.all

    def make_stats(
        self, spec: Any = None, kv_stats: KVConnectorStats | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        own = self.loop_stats() if self.log_stats else None
        if own is not None:
            kv_stats = own if kv_stats is None else kv_stats.aggregate(own)
        return super().make_stats(spec, kv_stats, *args, **kwargs)

    def loop_stats(self) -> KVStats | None:
        """Return the loop's counts once in a while, for most steps change little, and when there
        are no requests: that step may be the last one for long.
        """
        self._num_steps_unreported += 1
        if self._num_steps_unreported < STEPS_PER_STATS and self.records:
            return None
        self._num_steps_unreported = 0
        return KVStats(data={"controller": self.loop.counts.take()})

    def shutdown(self) -> None:
        self.loop.close()
        super().shutdown()

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or host slot is lost, or owned twice."""
        super().check_integrity()
        self.control.check_integrity()
        num_deferred = sum(len(blocks) for _, blocks in self.deferred_frees)
        self.block_owner.check_integrity(num_deferred, self._coordinator.drafts)


class LayerwiseScheduler(LayerwiseSchedulerMixin, Scheduler):  # type: ignore[misc]
    """The synchronous one."""


class AsyncLayerwiseScheduler(LayerwiseSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """The one that schedules a step ahead of the model."""
