"""How much host memory a rank takes by itself."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from services.executor import sizing
from services.executor.kv_options import AUTO, CONFIG_KEY, HostBytes, KVOptions
from services.executor.sizing import num_affordable_slots, num_host_slots

pytestmark = pytest.mark.filterwarnings("default")

GIB, MIB = 1 << 30, 1 << 20
BLOCK_SIZE = 16
NUM_GROUPS = 4


def config_of(
    host_bytes: HostBytes = AUTO, *, max_model_len: int = 0, num_ranks: int = 1, **options: Any
) -> Any:
    options = asdict(KVOptions(host_bytes=host_bytes, **options))
    return SimpleNamespace(
        additional_config={CONFIG_KEY: options},
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(local_world_size=num_ranks),
        max_in_flight_tokens=BLOCK_SIZE,
        num_speculative_tokens=0,
    )


def cache_of(num_blocks: int = 0, *, layers_per_group: int = 1, window: int = 0) -> Any:
    spec = SimpleNamespace(block_size=BLOCK_SIZE, page_size_bytes=MIB)
    names = ["layer"] * layers_per_group
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names)] * NUM_GROUPS
    if window:
        side = SimpleNamespace(**vars(spec), sliding_window=window)
        groups.append(SimpleNamespace(kv_cache_spec=side, layer_names=names))
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("host_bytes", "max_model_len", "num_slots"),
    [
        (AUTO, 1_600, 2_000),  # 400 blocks of the longest request
        (AUTO, 8_015, 2_000),
        (AUTO, 8_016, 2_004),  # 501 blocks in each of four groups
        (7 * MIB - 1, 8_016, 6),
        (0, 8_016, 0),
    ],
)
def test_by_itself_the_host_holds_twice_the_pool_or_the_longest_request(
    host_bytes: HostBytes, max_model_len: int, num_slots: int
) -> None:
    config = config_of(host_bytes, max_model_len=max_model_len)

    assert num_host_slots(config, cache_of(num_blocks=1_000)) == num_slots


def test_the_longest_request_has_windows_and_open_blocks_beside_its_full_ones() -> None:
    # A window of 40 tokens lies in ceil(39 / 16) + 1 blocks at most, and four groups have one open.
    config = config_of(max_model_len=8_016)

    assert num_host_slots(config, cache_of(num_blocks=1_000, window=40)) == 2_004 + 4 + 4


@pytest.mark.parametrize(
    ("free_gib", "limit_gib", "num_ranks", "num_slots"),
    [
        (16, None, 1, 6_000),  # all that is wanted
        (8, None, 1, 4_096),
        (8, None, 4, 1_024),
        (8, 4, 1, 2_048),
        (8, 64, 1, 4_096),
    ],
)
def test_by_itself_a_rank_takes_its_share_of_half_of_the_free_memory_at_most(
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    limit_gib: int | None,
    num_ranks: int,
    num_slots: int,
) -> None:
    free = SimpleNamespace(available=free_gib * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    limit = limit_gib and limit_gib * GIB
    monkeypatch.setattr(sizing, "get_cgroup_memory_limit", lambda: limit)

    assert num_affordable_slots(config_of(num_ranks=num_ranks), cache_of(), 6_000) == num_slots
    asked = config_of(64 * GIB, num_ranks=num_ranks)
    assert num_affordable_slots(asked, cache_of(), 6_000) == 6_000


def test_a_block_has_the_pages_of_its_groups_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(sizing, "get_cgroup_memory_limit", lambda: None)

    cache = cache_of(layers_per_group=2)

    assert num_affordable_slots(config_of(), cache, 6_000) == 2_048
