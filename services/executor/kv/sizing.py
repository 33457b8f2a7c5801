"""How much host memory a rank's slots take."""

from typing import TYPE_CHECKING

from services.executor.kv.options import KVOptions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def num_host_slots(options: KVOptions, kv_cache_config: "KVCacheConfig") -> int:
    """Return how many slots `host_bytes` holds on one rank. The same on scheduler and ranks."""
    return options.host_bytes // block_bytes(options, kv_cache_config)


def block_bytes(options: KVOptions, kv_cache_config: "KVCacheConfig") -> int:
    """Return the bytes of one block of one layer group on one rank."""
    page_bytes = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    return page_bytes * options.layers_per_group
