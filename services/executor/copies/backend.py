"""One rank's host memory and copy engine, chosen by options and device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.executor.copies.copy_engine import CopyEngine
from services.executor.copies.cpu_copy_engine import CpuCopyEngine, LinkModel
from services.executor.copies.device.cuda_copy_engine import CudaCopyEngine
from services.executor.copies.device.device_guard import DeviceGuard
from services.executor.copies.host.host_memory import HostMemory, PacedRegistrar, Registrar
from services.executor.copies.host.memory_node import node_of
from services.executor.copies.integrity_guard import GuardedEngine
from services.executor.copies.pages import GroupPages, page_sizes, pair_pages
from services.executor.kv_options import GuardMode, KVOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What moves a rank's KV, and where it goes."""

    engine: CpuCopyEngine | CudaCopyEngine
    pages: list[GroupPages]
    host: HostMemory

    def close(self) -> None:
        """Stop copies, then give memory back, unless a copy may still touch it. Idempotent."""
        self.engine.close()
        if isinstance(self.engine, CudaCopyEngine) and not self.engine.is_idle:
            return
        self.host.close()


def make_backend(
    options: KVOptions, pools: Sequence[Sequence[torch.Tensor]], *, num_slots: int
) -> Backend:
    """Make host memory for `num_slots` slots, and the engine that copies to and from it."""
    device = pools[0][0].device
    registrar, node = _registrar(options, device), node_of(device)
    sizes = page_sizes(pools)
    host = HostMemory(sizes, num_slots, registrar=registrar, node=node)
    pages = pair_pages(pools, host.slabs)
    engine = (
        _cpu_engine(options, pages)
        if device.type == "cpu"
        else _cuda_engine(options, pages, device, host.slots_per_range)
    )
    return Backend(engine=engine, pages=pages, host=host)


def _registrar(options: KVOptions, device: torch.device) -> Registrar | None:
    if device.type == "cpu":
        return PacedRegistrar(options.pin_bytes_per_s) if options.pin_bytes_per_s else None
    from services.executor.copies.device.cuda_device import CudaRegistrar

    return CudaRegistrar(device)


def _cpu_engine(options: KVOptions, pages: list[GroupPages]) -> CpuCopyEngine:
    return CpuCopyEngine(
        pages,
        h2d=LinkModel(
            bytes_per_s=options.h2d_bytes_per_s or None, latency_s=options.copy_latency_s
        ),
        d2h=LinkModel(
            bytes_per_s=options.d2h_bytes_per_s or None, latency_s=options.copy_latency_s
        ),
        poison_targets=options.poison,
    )


def _cuda_engine(
    options: KVOptions, pages: list[GroupPages], device: torch.device, slots_per_range: int
) -> CudaCopyEngine:
    from services.executor.copies.device.cuda_device import CudaDevice

    return CudaCopyEngine(
        pages,
        CudaDevice(device, rows_per_range=slots_per_range),
        poison_targets=options.poison,
    )


def guarded(options: KVOptions, backend: Backend, *, num_slots: int) -> CopyEngine:
    """Return a backend's engine with a guard before it, made by whoever can read the pool."""
    mode, engine, pages = GuardMode(options.integrity_guard), backend.engine, backend.pages
    if mode is GuardMode.OFF:
        return engine
    if isinstance(engine, CudaCopyEngine):
        return DeviceGuard(engine, pages, num_slots=num_slots, mode=mode)
    return GuardedEngine(engine, pages, num_slots=num_slots, mode=mode)
