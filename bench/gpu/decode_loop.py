"""Decode steps of a made-up model on real streams: the product's copies, and blocks with tags.

Every block that a layer reads must hold the tag of its request, layer, position and generation; a
layer's attention is the check of that, on the device. Staging is poisoned when a layer has used it,
and own blocks while their layer is away, so that what comes too early or too late shows.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.gpu.machine import POISON, Machine
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.device.integrity_guard import IntegrityGuard
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.host.host_memory import HostMemory
from services.executor.copies.pages import pair_pages
from services.executor.copies.timing.step_marks import StepMarks
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.kv_options import GuardMode
from services.executor.step_messages import (
    LoadTableUpdate,
    RestoreOrder,
    SaveOrder,
    StagingUpdate,
    StepFeedback,
    StepTransfers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopShape:
    num_layers: int = 16  # one per layer group
    num_requests: int = 4
    num_blocks: int = 16  # full ones of a request, in each layer
    page_bytes: int = 131_072
    num_staging: int = 2
    guarded: bool = False  # every block that comes back is checked by the engine's own guard

    @property
    def num_slots(self) -> int:
        return self.num_requests * self.num_layers * self.num_blocks


@dataclass(slots=True)
class LayerKV:
    """One request's KV in one layer, all full blocks of it."""

    own: list[int]  # its blocks while it is resident, and no other's at any time
    slots: list[int]
    generations: list[int]  # of each block
    offloaded: bool = False
    restore_id: int = 0  # under way; 0: none
    saved_step: list[int] = field(default_factory=list)  # in which each block was saved last


class DecodeLoop:
    """Runs steps whose placements the caller changes."""

    def __init__(self, machine: Machine, shape: LoopShape) -> None:
        self.machine, self.shape = machine, shape
        num_own = shape.num_slots
        num_staging = shape.num_requests * shape.num_staging * shape.num_blocks
        self._pool = torch.zeros(
            (1 + num_own + num_staging, shape.page_bytes), dtype=torch.uint8, device=machine.device
        )
        self._host = HostMemory([shape.page_bytes], num_own, registrar=machine.registrar)
        self._host.pin_first_chunk()
        self._host.start_pinning()
        self._host.wait_until_pinned()
        self.pages = pages = pair_pages([(self._pool,)] * shape.num_layers, self._host.slabs)
        self.engine = StreamCopyEngine(pages, machine.copies(self._host.slots_per_range))
        guard = None
        if shape.guarded:
            guard = IntegrityGuard(self.engine, pages, num_slots=num_own, mode=GuardMode.ALL)
        self.runner = TransferRunner(guard or self.engine, shape.num_layers, late_guard=guard)
        self.num_lost = 0  # requests, as the guard tells
        self.marks = StepMarks(self.engine)
        self.requests = [self._request(number) for number in range(shape.num_requests)]
        self.num_checked = 0  # blocks that a layer has read
        self.poisons = True
        self._step = 0
        self._saved_step = 0
        self._last_restore_id = 0
        self._changed: set[int] = set(range(shape.num_requests))  # whose tables are sent anew

    def _request(self, number: int) -> list[LayerKV]:
        shape = self.shape
        layers = []
        for layer in range(shape.num_layers):
            first = (number * shape.num_layers + layer) * shape.num_blocks
            slots = list(range(first, first + shape.num_blocks))
            random.Random(first).shuffle(slots)
            layers.append(
                LayerKV(
                    own=list(range(1 + first, 1 + first + shape.num_blocks)),
                    slots=slots,
                    generations=[0] * shape.num_blocks,
                    saved_step=[0] * shape.num_blocks,
                )
            )
        return layers

    # -- placements ---------------------------------------------------------------------------

    def offload(self, request: int, layers: Iterable[int]) -> None:
        """Take layers away whose host copies are complete; the others stay."""
        for layer in layers:
            kv = self.requests[request][layer]
            if not kv.offloaded and max(kv.saved_step) <= self._saved_step and min(kv.generations):
                kv.offloaded = True
                self._changed.add(request)
                if self.poisons:
                    self.machine.put(self._pool, kv.own, [POISON] * len(kv.own))

    def bring_back(self, request: int, layer: int, transfers: StepTransfers) -> None:
        """Order the copy of an offloaded layer to its own blocks; it flips when that is there."""
        kv = self.requests[request][layer]
        if not kv.offloaded or kv.restore_id:
            return
        self._last_restore_id += 1
        kv.restore_id = self._last_restore_id
        positions = list(range(self.shape.num_blocks))
        transfers.restores.append(
            RestoreOrder(kv.restore_id, str(request), layer, positions, kv.slots, kv.own)
        )

    # -- a step -------------------------------------------------------------------------------

    def message(self) -> StepTransfers:
        """Return an empty message of the next step."""
        return StepTransfers(step=self._step + 1)

    def run(self, transfers: StepTransfers, *, writes: Iterable[tuple[int, int, int]] = ()) -> None:
        """Run a step; `writes`: blocks of (request, layer, position) that it fills anew."""
        self._step += 1
        by_layer = self._order_saves(transfers, writes)
        self._send_tables(transfers)
        self.runner.take_in(transfers)
        self.runner.begin_step(transfers)
        self.marks.layers_begin(self._step)
        for layer in range(self.shape.num_layers):
            self._run_layer(layer, by_layer.get(layer, []))
        self.marks.layers_end()
        self.runner.end_step()
        self._absorb(self.runner.feedback())

    def _order_saves(
        self, transfers: StepTransfers, writes: Iterable[tuple[int, int, int]]
    ) -> dict[int, list[tuple[int, int]]]:
        by_layer: dict[int, list[tuple[int, int]]] = {}
        for request, layer, position in writes:
            kv = self.requests[request][layer]
            if kv.offloaded or kv.saved_step[position] > self._saved_step:
                continue  # its last copy may still read the block
            kv.generations[position] += 1
            kv.saved_step[position] = self._step
            by_layer.setdefault(layer, []).append((request, position))
            transfers.saves.append(
                SaveOrder(
                    str(request), layer, [position], [kv.slots[position]], [kv.own[position]], False
                )
            )
        return by_layer

    def _send_tables(self, transfers: StepTransfers) -> None:
        for request in self._changed:
            transfers.dropped_tables += [(str(request), n) for n in range(self.shape.num_layers)]
            transfers.num_staging[str(request)] = self.shape.num_staging
            transfers.staging_updates += [
                StagingUpdate(str(request), buffer, 0, self._blocks_of(request, buffer))
                for buffer in range(self.shape.num_staging)
            ]
            transfers.table_updates += [
                LoadTableUpdate(
                    str(request),
                    layer,
                    True,
                    ordinal % self.shape.num_staging,
                    [range(self.shape.num_blocks)],
                )
                for ordinal, layer in enumerate(self._chain(request))
            ]
        self._changed.clear()
        transfers.loading = [
            str(request) for request in range(self.shape.num_requests) if self._chain(request)
        ]

    def _chain(self, request: int) -> list[int]:
        return [layer for layer, kv in enumerate(self.requests[request]) if kv.offloaded]

    def _staging(self, request: int, layer: int) -> list[int]:
        ordinal = self._chain(request).index(layer)
        return self._blocks_of(request, ordinal % self.shape.num_staging)

    def _blocks_of(self, request: int, buffer: int) -> list[int]:
        shape = self.shape
        first = 1 + shape.num_slots
        first += (request * shape.num_staging + buffer) * shape.num_blocks
        return list(range(first, first + shape.num_blocks))

    def _run_layer(self, layer: int, written: list[tuple[int, int]]) -> None:
        if written:  # as vLLM: before the layer's load is waited for
            self.machine.put(
                self._pool,
                [self.requests[request][layer].own[position] for request, position in written],
                [self._tag(request, layer, position) for request, position in written],
            )
        self.runner.before_group(layer)
        self._attend(layer)
        self.machine.layer()
        self.runner.after_group(layer)

    def _attend(self, layer: int) -> None:
        blocks, tags, staged = [], [], []
        for request, layers in enumerate(self.requests):
            kv = layers[layer]
            row = self._staging(request, layer) if kv.offloaded else kv.own
            if kv.offloaded:
                staged += row
            for position, generation in enumerate(kv.generations):
                if generation:
                    blocks.append(row[position])
                    tags.append(self._tag(request, layer, position))
        if self.poisons and blocks:
            self.num_checked += len(blocks)
            self.machine.check(self._pool, blocks, tags)
            if staged:
                self.machine.put(self._pool, staged, [POISON] * len(staged))

    def _tag(self, request: int, layer: int, position: int) -> int:
        shape, kv = self.shape, self.requests[request][layer]
        block = (request * shape.num_layers + layer) * shape.num_blocks + position
        return 1 + kv.generations[position] * shape.num_slots + block

    def _absorb(self, feedback: StepFeedback) -> None:
        self.num_lost += len(feedback.lost_requests)
        assert self.shape.guarded or not self.num_lost, "a copy went wrong"
        self._saved_step = feedback.saved_step
        for request, layers in enumerate(self.requests):
            for kv in layers:
                if kv.restore_id and kv.restore_id in feedback.num_ranks_done:
                    kv.restore_id, kv.offloaded = 0, False
                    self._changed.add(request)

    # -- before and after ---------------------------------------------------------------------

    def fill(self) -> None:
        """Write every block once, and let every host copy be complete."""
        shape = self.shape
        for layer in range(shape.num_layers):
            blocks = [
                (r, layer, p) for r in range(shape.num_requests) for p in range(shape.num_blocks)
            ]
            self.run(self.message(), writes=blocks)
        self.settle()

    def settle(self) -> None:
        """Run steps until every copy to the host is confirmed."""
        for _ in range(1_000):
            if self._saved_step >= self._step:
                return
            self.machine.finish()
            self.run(self.message())
        raise RuntimeError("copies to the host never end")

    def take_verdicts(self) -> None:
        """Let what the guard has begun come to its end."""
        for _ in range(2):
            self.machine.finish()
            self.run(self.message())

    def break_it(self, how: str) -> None:
        """Leave something out that is needed: "waits", or the order of "slots"; empty: nothing."""
        engine: Any = self.engine
        if how == "waits":
            engine.wait = lambda ticket, timeout_s=0.0: 0.0
        elif how == "slots":
            engine.submit = _with_slots_swapped(engine.submit)

    def close(self) -> None:
        self.machine.finish()
        self.engine.close()
        self._host.close()


def _with_slots_swapped(submit: Callable[[Copy], Any]) -> Callable[[Copy], Any]:
    def swapped(copy: Copy) -> Any:
        is_load = copy.direction is Direction.H2D
        return submit(replace(copy, slots=copy.slots[::-1]) if is_load else copy)

    return swapped
