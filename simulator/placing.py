"""Carries out what a plan says about one request's layers."""

from services.placement.types import EngineShape, Placement
from simulator.copies import CopyJob, Lane
from simulator.requests import LiveRequest
from simulator.scheduler import Scheduler
from simulator.step import RESTORE


def groups_of(placement: Placement, shape: EngineShape) -> frozenset[int]:
    """Return the layer groups that a placement wants on the host."""
    return frozenset(layer // shape.layers_per_group for layer in placement.offloaded_layers)


def place(request: LiveRequest, placement: Placement, scheduler: Scheduler) -> bool:
    """Offload what leaves at once, and note what is to come back.

    False, and nothing has left, where the pool has no room for the staging: the plan's groups are
    tried again with the next plan, and until then the scheduler makes room itself.
    """
    kv = request.kv
    if not kv.mirrored:
        return not placement.offloaded_layers
    wanted = groups_of(placement, scheduler.shape)
    kv.wanted, kv.wanted_buffers = wanted, placement.num_prefetch_buffers
    for group in wanted & kv.restoring.keys():
        kv.restoring.pop(group).cancelled = True
        scheduler.refresh(request)
    offloaded = tuple(sorted({*kv.offloaded, *wanted}))
    if not offloaded:
        return True
    # While groups come back their staging stays as it is.
    buffers = placement.num_prefetch_buffers if wanted == set(offloaded) else kv.num_buffers
    buffers = min(max(1, buffers), len(offloaded))
    need = kv.num_owned(num_offloaded=len(offloaded), num_buffers=buffers)
    if not scheduler.pool.set_owned(request.request_id, need):
        return False
    kv.offloaded, kv.num_buffers = offloaded, buffers
    return True


def start_restores(scheduler: Scheduler, h2d: Lane, now_s: float) -> None:
    """Begin to bring back what no plan wants on the host, as far as blocks are to spare.

    One more block per group of every running request is left for the steps to come.
    """
    spare = scheduler.shape.num_groups * len(scheduler.running)
    for request in scheduler.running:
        kv = request.kv
        if kv.wanted is None or kv.asleep or request.is_paused:
            continue
        for group in kv.offloaded:
            if group in kv.wanted or group in kv.restoring:
                continue
            if scheduler.pool.num_free - kv.num_full_blocks < spare:
                return
            num_bytes = kv.num_host_blocks * scheduler.shape.block_bytes
            job = CopyJob(num_bytes=num_bytes, priority=(RESTORE, 0))
            kv.restoring[group] = job
            h2d.submit(job, now_s)
            scheduler.refresh(request)
