"""What an executor tells of its KV before it has served anybody."""

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms  # noqa: F401 - seconds, that are no test's

from services.control.options import ControllerOptions
from services.executor.engine.kv_facts import kv_facts
from services.executor.kv_options import CONFIG_KEY
from services.executor.types import KVFacts
from services.placement.run.promise import Limit
from tests.unit.placement.test_layer_kinds import DEEPSEEK_V3, GEMMA_3_27B, LLAMA

TOKEN_BYTES = 4 * 1_000  # four layers
TOLD = {
    "shape": {
        "num_layers": 4,
        "layers_per_group": 1,
        "block_size": 16,
        "num_blocks": 4 * 2_560,  # 40,960 tokens
        "block_bytes": 16_000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2_048,
        "num_host_blocks": 4 * 3_855,  # 15 requests of 4,096 tokens and one more, 257 rows each
    },
    "num_host_tokens": 16 * 3_855,
    "token_bytes": TOKEN_BYTES,
    "weight_bytes": 40_960 * TOKEN_BYTES,  # as much as the pool
    "step_s": 0.01,
    "link_bytes_per_s": 1e9,
}


def facts(
    *,
    policy: str = "evenflow",
    max_model_len: int = 32_768,
    model: dict[str, Any] = LLAMA,
    **told: Any,
) -> KVFacts:
    options = ControllerOptions(policy=policy).engine_args()
    additional = {CONFIG_KEY: {}, **options}
    config = engine_config(additional, max_model_len=max_model_len, model=model)
    return kv_facts(config, TOLD | told)


def engine_config(
    additional_config: dict[str, Any],
    *,
    max_model_len: int = 32_768,
    model: dict[str, Any] = LLAMA,
) -> Any:
    """Return a configuration; of MLA that of the backend which computes prompts whole."""
    latents = model is DEEPSEEK_V3
    return SimpleNamespace(
        additional_config=additional_config,
        cache_config=SimpleNamespace(num_gpu_blocks=4 * 2_560, block_size=16),
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: 4,
            max_model_len=max_model_len,
            use_mla=latents,
            is_hybrid=False,
            hf_config=SimpleNamespace(to_dict=lambda: model),
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=not latents),
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )


def test_readers_are_counted_by_steps_that_read_weights_and_pool() -> None:
    readers = facts().readers

    # 2,560 rows hold 9 requests of 257. A full pool's step reads twice the bytes of a short one and
    # takes 20 ms: who reads 5 tokens/s runs 0.1 of the time, and 0.0063 on its way back, 16 ms
    # after 2.3 s. So 79 readers have 0.106 x 79 x 257 = 2,154 rows, of 0.9 x 2,560 less half a
    # request, 2,175; 80 would have 2,180.
    assert readers is not None
    assert (readers.num_tokens, readers.rate_tps) == (4_096, 5.0)
    assert (readers.num_held, readers.num_kept, readers.num_sustained) == (9, 15, 79)
    assert (readers.binds, readers.limit) == (Limit.HOST, Limit.POOL)
    slower = facts(weight_bytes=TOLD["weight_bytes"] // 3).readers
    assert slower is not None
    assert 15 < slower.num_sustained < 0.6 * readers.num_sustained  # steps of 40 ms


def test_a_short_context_holds_what_is_asked() -> None:
    readers = facts(max_model_len=600).readers

    assert readers is not None
    assert readers.num_tokens == 600


def test_of_other_policies_and_unknown_links_nothing_is_said() -> None:
    assert facts(policy="orbitflow").readers is None
    assert facts(link_bytes_per_s=0.0).readers is None


@pytest.mark.parametrize("policy", ["evenflow", "vllm"])
def test_a_policy_where_layers_cannot_leave_is_named(policy: str) -> None:
    options = {} if policy == "vllm" else ControllerOptions(policy=policy).engine_args()
    config = engine_config(options)

    found = kv_facts(config, {})

    assert not found.is_layerwise
    assert (found.policy, found.run_policy) == (policy, "fcfs" if policy == "vllm" else policy)
    assert found.readers is None


def test_the_kinds_of_layers_are_told_and_what_is_computed_again() -> None:
    assert facts().layers == "32 of full attention: all may leave the pool"
    assert facts(model=DEEPSEEK_V3).layers == (
        "61 of MLA: all may leave the pool; a request that gave up all its KV is computed again"
    )
    assert facts(model=GEMMA_3_27B).layers == (
        "52 of sliding windows, 10 of full attention: 10 may leave the pool; "
        "a request that is preempted, not parked, is computed again"
    )


def test_a_pools_tokens_are_those_of_the_layers_that_may_leave() -> None:
    shape = TOLD["shape"] | {"num_layers": 2, "side_windows": (64, 64)}

    assert facts(shape=shape).num_pool_tokens == 2 * facts().num_pool_tokens


def test_windows_are_told_as_a_list_and_take_their_room() -> None:
    shape = TOLD["shape"] | {"side_windows": [32] * 4, "max_in_flight_tokens": 512}
    readers, dense = facts(shape=shape).readers, facts().readers

    assert readers is not None
    assert dense is not None
    assert (readers.num_kept, dense.num_kept) == (14, 15)
