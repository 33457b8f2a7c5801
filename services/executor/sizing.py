"""How long blocks are, and how much host memory a rank's slots take."""

from typing import TYPE_CHECKING

import psutil
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec

from services.executor.kv_options import AUTO, FREE_MEMORY_SHARE, KVOptions
from services.placement.blocks import STATE, BlockGeometry, side_copy_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


MIN_PAGE_BYTES = 128 << 10  # smaller pages cost a device's copy engines much of their rate
TABLE_ENTRY_BYTES = 4
HOST_POOLS = 2  # what the host wants, in pools (`docs/who-runs.md`, "Room on the host")
BLOCK_STEP_TOKENS, MAX_BLOCK_TOKENS = 16, 128


def block_size_for_copies(token_bytes: int) -> int:
    """Return the fewest tokens per block at which a page is large enough for copy engines.

    `token_bytes`: KV of one token in one layer on one rank. A multiple of 16, at most 128.
    """
    num_steps = -(-MIN_PAGE_BYTES // (token_bytes * BLOCK_STEP_TOKENS))
    return min(MAX_BLOCK_TOKENS, num_steps * BLOCK_STEP_TOKENS)


def side_window(spec: KVCacheSpec) -> int | None:
    """Return how many tokens' KV a group that never leaves keeps, or STATE; None: it may leave."""
    if isinstance(spec, MambaSpec):
        return STATE
    window: int | None = getattr(spec, "sliding_window", None)
    return window or getattr(spec, "attention_chunk_size", None)


def offloadable_groups(kv_cache_config: "KVCacheConfig") -> list[KVCacheGroupSpec]:
    """Return the groups that may leave the pool; they come before the others."""
    groups = kv_cache_config.kv_cache_groups
    return [group for group in groups if side_window(group.kv_cache_spec) is None]


def block_geometry(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> BlockGeometry:
    """Return what the block formula takes of an engine."""
    groups = offloadable_groups(kv_cache_config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    windows = [side_window(spec) for spec in specs]
    block_size = groups[0].kv_cache_spec.block_size
    sizes = [spec.block_size for spec, window in zip(specs, windows, strict=True) if window]
    return BlockGeometry(
        num_groups=len(groups),
        block_size=block_size,
        side_windows=tuple(window for window in windows if window is not None),
        side_block_size=sizes[0] if sizes and sizes[0] != block_size else 0,
        max_in_flight_tokens=config.max_in_flight_tokens,
        max_ahead_tokens=max_ahead_tokens(config),
    )


def max_ahead_tokens(config: "VllmConfig") -> int:
    """Return for how many tokens a request has room behind those that cannot be rejected any more.

    Each step in flight may accept all of its drafts; the drafter writes some way ahead of the last.
    """
    num_drafts: int = config.num_speculative_tokens
    if not num_drafts:
        return 0
    return num_drafts * int(config.max_concurrent_batches) + int(config.num_lookahead_tokens)


def num_host_slots(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Return how many slots a rank is to have. The same on scheduler and ranks.

    By itself twice the blocks of the pool, and no fewer than the longest request has.
    """
    options = KVOptions.of(config)
    if options.host_bytes != AUTO:
        return options.host_bytes // block_bytes(kv_cache_config)
    geometry = block_geometry(config, kv_cache_config)
    num_tokens = config.model_config.max_model_len
    num_longest = geometry.num_groups * (num_tokens // geometry.block_size)
    num_longest += side_copy_blocks(geometry, num_tokens=num_tokens)
    return int(max(HOST_POOLS * kv_cache_config.num_blocks, num_longest))


def num_affordable_slots(
    config: "VllmConfig", kv_cache_config: "KVCacheConfig", num_slots: int
) -> int:
    """Return how many of these slots a rank takes: all that were asked for in bytes.

    By itself no more than its share of half of the memory that its node has free. A control
    group's limit counts as what it has: of what is used there, much is files that can go.
    """
    options = KVOptions.of(config)
    if options.host_bytes != AUTO:
        return num_slots
    free_bytes = psutil.virtual_memory().available
    free_bytes = min(free_bytes, get_cgroup_memory_limit() or free_bytes)
    share_bytes = FREE_MEMORY_SHARE * free_bytes / config.parallel_config.local_world_size
    return min(num_slots, int(share_bytes) // block_bytes(kv_cache_config))


def block_bytes(kv_cache_config: "KVCacheConfig") -> int:
    """Return the bytes of one block of one layer group on one rank.

    Raises ValueError if groups differ: a pipeline stage may have layers unlike another's.
    """
    groups = offloadable_groups(kv_cache_config)
    specs = [group.kv_cache_spec for group in groups]
    sizes = {(spec.block_size, int(spec.page_size_bytes)) for spec in specs}
    if len(sizes) > 1:
        raise ValueError(
            "layer-wise KV does not work with layer groups of unlike blocks, (tokens, bytes): "
            f"{sorted(sizes)}"
        )
    ((_, page_bytes),) = sizes
    return page_bytes * max(len(group.layer_names) for group in groups)


def block_table_bytes(vllm_config: "VllmConfig") -> int:
    """Return the bytes of one block table per layer group of a rank."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    num_layers: int = model.get_num_layers(vllm_config.parallel_config)
    num_groups = num_layers // KVOptions.of(vllm_config).layers_per_group
    num_blocks = -(-model.max_model_len // vllm_config.cache_config.block_size)
    return int(num_groups * scheduler.max_num_seqs * num_blocks * TABLE_ENTRY_BYTES)


def are_slots_ready_at_start(options: KVOptions) -> bool:
    """Return whether every slot can be used from the first step on.

    Otherwise slots are pinned in the background, and each rank reports how many are ready.
    """
    return current_platform.is_cpu() and not options.pin_bytes_per_s
