"""A batch of running requests as problem instances, one per window length."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.placement.judging.slo import promise_of
from services.placement.mirror import Mirror, mirror_of
from services.placement.step_time.batch import (
    SEALING_STEPS,
    capacity_blocks,
    group_sizes,
    holders_of,
    placed_pattern,
    sealing_tokens,
    step_compute_s,
)
from services.placement.step_time.patterns import Pattern
from services.placement.step_time.prefill import Progress, largest_chunk, progress_of
from services.placement.types import Link, PrefixState, Profile, RequestState, Snapshot
from services.planner.policy.window import BatchGrowth, Course, Promises, late_tokens, steps_of
from services.planner.solver.instance import FORBIDDEN, Instance, Weights, make_instance
from services.planner.solver.kernels.load import Board
from services.planner.solver.library import Floats, Ints, PatternLibrary

MAX_STEPS = 2**31  # more than any window has


class Batch:
    """Requests that would run together. The snapshot has a profile and a host-to-GPU link.

    A row [R] is a holder: a request's own part, or a prefix that some of them begin with.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        requests: Sequence[RequestState],
        library: PatternLibrary,
        mirror: Mirror | None = None,
    ) -> None:
        """Take the requests. `mirror`: of the snapshot, where it is at hand already."""
        assert snapshot.profile is not None
        assert snapshot.h2d is not None
        self.snapshot, self.requests, self.library = snapshot, tuple(requests), library
        self.holders = holders_of(snapshot, self.requests)
        self._profile: Profile = snapshot.profile
        self._link: Link = snapshot.h2d
        self.capacity = capacity_blocks(snapshot)
        self._mirror = mirror or mirror_of(snapshot)
        self._instances: dict[tuple[int, int, bool], Instance] = {}

    @cached_property
    def present(self) -> list[Pattern]:
        """Return each holder's pattern of the plan in force."""
        return [placed_pattern(holder, self.snapshot.engine) for holder in self.holders]

    @cached_property
    def _present_offloaded(self) -> Floats:
        """[R, G] 1 where a group is offloaded now."""
        present = np.zeros((len(self.holders), self.library.num_groups))
        for r, pattern in enumerate(self.present):
            present[r, list(pattern.offloaded)] = 1.0
        return present

    @cached_property
    def _restored(self) -> Floats:
        """[R, K] groups that come back from the host under each pattern."""
        return self._present_offloaded @ (1.0 - self.library.tables.offloaded).T

    @cached_property
    def _missing(self) -> Floats:
        """[R, G] full blocks that are not on the host: `mirror.Mirror.missing`."""
        missing = self._mirror.missing
        return np.array([missing[one.holder_id] for one in self.holders], dtype=np.float64)

    @cached_property
    def _late_blocks(self) -> Floats:
        """[R, K] pool blocks until a pattern's groups are on the host."""
        return self._missing @ self.library.tables.offloaded.T

    @cached_property
    def _forbidden(self) -> NDArray[np.bool_]:
        """[R, K] whether a pattern offloads what is not on the host: `Mirror.allows`."""
        lacking = (self._missing > SEALING_STEPS).astype(np.float64)
        many = lacking @ self.library.tables.offloaded.T > 0.0
        return np.asarray(many & (self._late_blocks > self._mirror.num_soon))

    @cached_property
    def _num_tokens(self) -> Ints:
        """[R] tokens that have to fit the pool: a prompt counts in full from the start."""
        return np.array([holder.num_tokens for holder in self.holders], dtype=np.int64)

    @cached_property
    def _grows(self) -> Ints:
        """[R] 1 where tokens are added; 0: a prefix."""
        return (self._per_step > 0.0).astype(np.int64)

    @cached_property
    def _per_step(self) -> Floats:
        """[R] tokens that a decode step adds, mean; 0: a prefix."""
        prefix, holders = PrefixState, self.holders
        return np.array([0.0 if isinstance(o, prefix) else o.tokens_per_step for o in holders])

    def _grown(self, num_steps: int) -> Ints:
        """[R] tokens after so many decode steps."""
        return self._num_tokens + np.ceil(num_steps * self._per_step).astype(np.int64)

    @cached_property
    def _chunk_blocks(self) -> Ints:
        """[R] blocks per group of the prefill chunk that is running."""
        engine = self.snapshot.engine
        chunks = [largest_chunk(holder, engine) for holder in self.holders]
        return -(-np.array(chunks, dtype=np.int64) // engine.block_size)

    @cached_property
    def _progress(self) -> list[Progress]:
        return progress_of(self.holders, self.snapshot.engine)

    @cached_property
    def _has_prompts(self) -> bool:
        return any(one.num_left for one in self._progress)

    @cached_property
    def num_steps_alike(self) -> int:
        """Steps until a prompt is complete, so that the steps become shorter; a bound if none."""
        return min((p.num_chunk_steps for p in self._progress if p.chunk), default=MAX_STEPS)

    def longest_step(self, window: int) -> int:
        """Return the longest step of a window: the last one with all prompts under way."""
        return min(window, self.num_steps_alike) - 1

    def _copy_s(self, num_blocks: Ints) -> Floats:
        """[R] time on the link for so many blocks of one group: `batch.fetch_s`."""
        num_bytes = num_blocks.astype(np.float64) * self.snapshot.engine.block_bytes
        copies = np.ceil(num_bytes / self._link.chunk_bytes)
        return num_bytes / self._link.bytes_per_s + copies * self._link.copy_overhead_s

    def _tokens_read(self, step: int) -> Ints:
        """[R] tokens whose KV the step reads."""
        if not self._has_prompts:
            return self._grown(step)
        return np.array([p.tokens_read_at(step) for p in self._progress], dtype=np.int64)

    def _weights(self, *, window: int, read_after: int) -> Weights:
        """Return what `demand_of` says of each holder, for all holders at once."""
        engine, tokens, grows = self.snapshot.engine, self._num_tokens, self._grows
        size, after = engine.block_size, self._grown(window)
        full = after // size
        partial = -(-(after + engine.max_ahead_tokens * grows) // size) - full
        sealing = (full > np.maximum(tokens - sealing_tokens(engine), 0) // size) * grows
        return Weights(
            transfer_s=self._copy_s(self._tokens_read(read_after) // size),
            full_blocks=full.astype(np.float64),
            resident_blocks=(full + partial).astype(np.float64),
            offloaded_blocks=(partial + sealing + self._chunk_blocks).astype(np.float64),
        )

    @cached_property
    def _restore_s(self) -> Floats:
        """[R] time on the link to bring one group back."""
        return self._copy_s(self._num_tokens // self.snapshot.engine.block_size)

    @cached_property
    def promises(self) -> Promises:
        """Return the promises of the requests that have an SLO."""
        deposit = self.snapshot.parameters.deposit is not False
        given = (promise_of(request, deposit=deposit) for request in self.requests)
        found = [promise for promise in given if promise is not None]
        return Promises(
            np.array([promise.interval_s for promise in found]),
            np.array([promise.slack_s for promise in found]),
        )

    def present_choice(self) -> Ints:
        """Return the plan in force; a pattern outside the library by the nearest one inside."""
        return np.array([self._column(pattern) for pattern in self.present], dtype=np.int64)

    def _column(self, pattern: Pattern) -> int:
        known = self.library.index.get(pattern)
        if known is not None:
            return known
        return int(np.argmin(np.abs(self.library.tables.num_jobs - pattern.num_offloaded)))

    def instance(self, *, window: int, read_after: int, switching: bool) -> Instance:
        """Return the problem with the most pool blocks of `window`. Do not write to its arrays.

        Copies and compute are those of the step after `read_after` more tokens. With `switching`,
        what has to be brought back first is spread over the window.
        """
        key = (window, read_after, switching)
        if key not in self._instances:
            self._instances[key] = self._make_instance(*key)
        return self._instances[key]

    def _make_instance(self, window: int, read_after: int, switching: bool) -> Instance:
        weights = self._weights(window=window, read_after=read_after)
        engine, progress = self.snapshot.engine, self._progress
        instance = make_instance(
            self.library,
            weights,
            compute_s=np.array(step_compute_s(engine, self._profile, progress, read_after)),
            capacity=self.capacity,
        )
        if window > 1:
            instance.use[:] = np.maximum(instance.use, self._use_before(window))
        if self._present_offloaded.any():
            instance.use[:] += self._restore_blocks(weights.full_blocks)
            if switching:
                instance.penalty_s[:] += self._restored * self._restore_s[:, None] / window
        instance.use[:] += self._late_blocks
        instance.use[self._forbidden] = FORBIDDEN
        return instance

    def _use_before(self, window: int) -> Floats:
        """[R, K] pool blocks one step before the end: more, where the end fills a block."""
        weights = self._weights(window=window - 1, read_after=0)
        compute_s = np.zeros(self.library.num_groups)
        return make_instance(self.library, weights, compute_s=compute_s, capacity=0.0).use

    def _restore_blocks(self, full_blocks: Floats) -> Floats:
        """[R, K] staging that is kept until what comes back is there."""
        present = np.array([pattern.num_buffers for pattern in self.present])
        spare = np.maximum(present[:, None] - self.library.tables.buffers[None, :], 0)
        return np.where(self._restored > 0.0, spare * full_blocks[:, None], 0.0)

    def switch_s(self, choice: Ints) -> float:
        """Return the time on the link to install a choice."""
        rows = np.arange(len(self.holders))
        return float(self._restored[rows, choice] @ self._restore_s)

    def course(self, choice: Ints, horizon: int) -> Course:
        """Return the next `horizon` steps under a choice, exactly."""
        instance = self.instance(window=1, read_after=0, switching=False)
        instance = instance._replace(compute_s=instance.compute_s.copy())
        board = Board(instance, self.library.tables)
        steps_s, blocks = np.zeros(horizon), np.zeros(horizon)
        steps_of(choice, board, self._growth(choice), steps_s, blocks)
        late = np.zeros(horizon, dtype=np.int64)
        late_tokens(self.promises, steps_s, self._profile.outside_layers_s, late)
        return Course(steps_s=steps_s, blocks=blocks, late=late)

    def _growth(self, choice: Ints) -> BatchGrowth:
        engine, profile, link = self.snapshot.engine, self._profile, self._link
        rows = np.arange(len(self.holders))
        passing = self._late_blocks[rows, choice]
        if self._present_offloaded.any():
            full = self._num_tokens // engine.block_size
            passing = passing + self._restore_blocks(full.astype(np.float64))[rows, choice]
        progress = self._progress
        return BatchGrowth(
            num_tokens=self._num_tokens,
            num_read=np.array([p.num_tokens for p in progress], dtype=np.int64),
            num_left=np.array([p.num_left for p in progress], dtype=np.int64),
            chunk=np.array([p.chunk for p in progress], dtype=np.int64),
            num_shared=np.array([p.num_shared for p in progress], dtype=np.int64),
            grows=self._grows,
            per_step=self._per_step,
            chunk_blocks=self._chunk_blocks,
            passing_blocks=passing,
            group_layers=np.array(
                group_sizes(engine.num_layers, engine.layers_per_group), dtype=np.float64
            ),
            layer_base_s=profile.layer_base_s,
            layer_s_per_token=profile.layer_s_per_token,
            layer_s_per_context_token=profile.layer_s_per_context_token,
            chunk_layer_s_per_token=profile.prefill_s_per_token / engine.num_layers,
            block_size=engine.block_size,
            ahead=engine.max_ahead_tokens,
            sealing_tokens=sealing_tokens(engine),
            block_bytes=engine.block_bytes,
            bytes_per_s=link.bytes_per_s,
            copy_overhead_s=link.copy_overhead_s,
            chunk_bytes=link.chunk_bytes,
        )
