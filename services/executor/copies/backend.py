"""One rank's host memory and copy engine, chosen by options and device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.executor.copies.device.cpu_device import CpuDevice, LinkModel
from services.executor.copies.device.integrity_guard import IntegrityGuard
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.host.host_memory import HostMemory, PacedRegistrar, Registrar
from services.executor.copies.host.memory_node import node_of
from services.executor.copies.pages import GroupPages, page_sizes, pair_pages
from services.executor.copies.streams import Device
from services.executor.kv_options import GuardMode, KVOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What moves a rank's KV, and where it goes."""

    engine: StreamCopyEngine
    pages: list[GroupPages]
    host: HostMemory

    def close(self) -> None:
        """Stop copies, then give memory back, unless a copy may still touch it. Idempotent."""
        self.engine.close()
        if self.engine.is_idle:
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
    engine = StreamCopyEngine(
        pages, _device(options, device, host.slots_per_range), poison_targets=options.poison
    )
    return Backend(engine=engine, pages=pages, host=host)


def _registrar(options: KVOptions, device: torch.device) -> Registrar | None:
    if device.type == "cpu":
        return PacedRegistrar(options.pin_bytes_per_s) if options.pin_bytes_per_s else None
    from services.executor.copies.device.cuda_device import CudaRegistrar

    return CudaRegistrar(device)


def _device(options: KVOptions, device: torch.device, slots_per_range: int) -> Device:
    if device.type == "cpu":
        return CpuDevice(
            h2d=_link(options, options.h2d_bytes_per_s), d2h=_link(options, options.d2h_bytes_per_s)
        )
    from services.executor.copies.device.cuda_device import CudaDevice

    return CudaDevice(device, rows_per_range=slots_per_range)


def _link(options: KVOptions, bytes_per_s: float) -> LinkModel:
    return LinkModel(bytes_per_s=bytes_per_s or None, latency_s=options.copy_latency_s)


def make_guard(options: KVOptions, backend: Backend, *, num_slots: int) -> IntegrityGuard | None:
    """Return a guard before a backend's engine; None if it is switched off."""
    mode = GuardMode(options.integrity_guard)
    if mode is GuardMode.OFF:
        return None
    return IntegrityGuard(backend.engine, backend.pages, num_slots=num_slots, mode=mode)
