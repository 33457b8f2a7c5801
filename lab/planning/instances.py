"""Seeded placement problems: batches of realistic shapes and links."""

from dataclasses import dataclass

import numpy as np

from services.planner.solver.instance import Instance, Weights, make_instance
from services.planner.solver.library import PatternLibrary


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A model on a GPU, per rank."""

    num_layers: int
    layer_bytes: float  # weights of one layer
    kv_bytes_per_token: float  # of one layer
    memory_bytes_per_s: float  # usable
    link_bytes_per_s: tuple[float, ...]  # host to GPU, by PCIe generation


HARDWARE = {
    "8b-a5000": Hardware(
        num_layers=32,
        layer_bytes=436e6,
        kv_bytes_per_token=4_096,
        memory_bytes_per_s=0.8 * 768e9,
        link_bytes_per_s=(12e9, 24e9),
    ),
    "8b-h100": Hardware(
        num_layers=32,
        layer_bytes=436e6,
        kv_bytes_per_token=4_096,
        memory_bytes_per_s=0.7 * 3_350e9,
        link_bytes_per_s=(24e9, 50e9),
    ),
    "13b-a100": Hardware(
        num_layers=40,
        layer_bytes=634e6,
        kv_bytes_per_token=8_192,
        memory_bytes_per_s=0.7 * 2_000e9,
        link_bytes_per_s=(24e9, 50e9),
    ),
    "70b-tp4": Hardware(
        num_layers=80,
        layer_bytes=1_711e6 / 4,
        kv_bytes_per_token=1_024,
        memory_bytes_per_s=0.8 * 768e9,
        link_bytes_per_s=(12e9, 24e9),
    ),
}
BLOCK_SIZE = 16
LAUNCH_S = 30e-6  # per layer


def realistic_instance(
    random: np.random.Generator,
    library: PatternLibrary,
    hardware: Hardware,
    num_requests: int,
    *,
    layers_per_group: int = 1,
) -> Instance:
    """Return a decode batch under memory pressure.

    Half the batches have contexts of 1K to 128K tokens and room for 35 to 98 % of their KV, half
    have 512 to 8K tokens and room for 75 to 99 %: near the edge of needing any offloading.
    """
    long = random.random() < 0.5
    low, high = (1_024, 131_072) if long else (512, 8_192)
    tokens = np.exp(random.uniform(np.log(low), np.log(high), num_requests)).astype(np.int64)
    full = (tokens // BLOCK_SIZE).astype(np.float64)
    open_ = (tokens % BLOCK_SIZE > 0).astype(np.float64)
    link = float(random.choice(hardware.link_bytes_per_s)) * random.uniform(0.8, 1.0)
    block_bytes = BLOCK_SIZE * hardware.kv_bytes_per_token * layers_per_group
    read_bytes = hardware.layer_bytes + float(tokens.sum()) * hardware.kv_bytes_per_token
    layer_s = read_bytes / hardware.memory_bytes_per_s + LAUNCH_S
    last = hardware.num_layers - (library.num_groups - 1) * layers_per_group
    layers = np.full(library.num_groups, float(layers_per_group))
    layers[-1] = last
    share = random.uniform(0.35, 0.98) if long else random.uniform(0.75, 0.99)
    return make_instance(
        library,
        Weights(
            transfer_s=full * block_bytes / link,
            full_blocks=full,
            resident_blocks=full + open_,
            offloaded_blocks=open_,
        ),
        compute_s=layer_s * layers,
        capacity=float(np.floor(share * library.num_groups * (full + open_).sum())),
    )
