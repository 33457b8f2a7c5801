"""How long blocks are, and how much host memory a rank's slots take."""

from typing import TYPE_CHECKING

import psutil
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

from services.executor.kv_options import AUTO, FREE_MEMORY_SHARE, KVOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


MIN_PAGE_BYTES = 128 << 10  # smaller pages cost a device's copy engines much of their rate
TABLE_ENTRY_BYTES = 4
HOST_POOLS = 2  # what the host wants, in pools (docs/who-runs.md, "Room on the host")
BLOCK_STEP_TOKENS, MAX_BLOCK_TOKENS = 16, 128


def block_size_for_copies(token_bytes: int) -> int:
    """Return the fewest tokens per block at which a page is large enough for copy engines.

    `token_bytes`: KV of one token in one layer on one rank. A multiple of 16, at most 128.
    """
    num_steps = -(-MIN_PAGE_BYTES // (token_bytes * BLOCK_STEP_TOKENS))
    return min(MAX_BLOCK_TOKENS, num_steps * BLOCK_STEP_TOKENS)


def num_host_slots(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Return how many slots a rank is to have. The same on scheduler and ranks.

    By itself twice the blocks of the pool, and no fewer than the longest request has.
    """
    options = KVOptions.of(config)
    if options.host_bytes != AUTO:
        return options.host_bytes // block_bytes(options, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    num_longest = config.model_config.max_model_len // groups[0].kv_cache_spec.block_size
    return int(max(HOST_POOLS * kv_cache_config.num_blocks, len(groups) * num_longest))


def num_affordable_slots(
    config: "VllmConfig", kv_cache_config: "KVCacheConfig", num_slots: int
) -> int:
    """Return how many of these slots a rank takes: all that were asked for in bytes.

    By itself no more than its share of half of the memory that the machine has free. A control
    group's limit counts as what it has: of what is used there, much is files that can go.
    """
    options = KVOptions.of(config)
    if options.host_bytes != AUTO:
        return num_slots
    free_bytes = psutil.virtual_memory().available
    free_bytes = min(free_bytes, get_cgroup_memory_limit() or free_bytes)
    share_bytes = FREE_MEMORY_SHARE * free_bytes / config.parallel_config.world_size
    return min(num_slots, int(share_bytes) // block_bytes(options, kv_cache_config))


def block_bytes(options: KVOptions, kv_cache_config: "KVCacheConfig") -> int:
    """Return the bytes of one block of one layer group on one rank.

    Raises ValueError if groups differ: a pipeline stage may have layers unlike another's.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = {(spec.block_size, int(spec.page_size_bytes)) for spec in specs}
    if len(sizes) > 1:
        raise ValueError(
            "layer-wise KV does not work with layer groups of unlike blocks, (tokens, bytes): "
            f"{sorted(sizes)}"
        )
    ((_, page_bytes),) = sizes
    return page_bytes * options.layers_per_group


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
