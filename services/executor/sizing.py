"""How much host memory a rank's slots take."""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from services.executor.kv_options import HostMemoryForm, KVOptions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def num_host_slots(options: KVOptions, kv_cache_config: "KVCacheConfig") -> int:
    """Return how many slots `host_bytes` holds on one rank. The same on scheduler and ranks."""
    return options.host_bytes // block_bytes(options, kv_cache_config)


def block_bytes(options: KVOptions, kv_cache_config: "KVCacheConfig") -> int:
    """Return the bytes of one block of one layer group on one rank."""
    page_bytes = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    return page_bytes * options.layers_per_group


def are_slots_ready_at_start(options: KVOptions) -> bool:
    """Return whether every slot can be used from the first step on.

    Otherwise slots are pinned in the background, and each rank reports how many are ready.
    """
    if options.host_memory == HostMemoryForm.RING:
        return True
    return current_platform.is_cpu() and not options.pin_bytes_per_s
