"""vLLM's schedulers as ours extend them, on real state, without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.models import exactness_model
from services.executor import kv_holders
from services.executor.engine.config import make_config
from services.executor.kv_holders import HoldingRequest
from services.executor.observation import RequestObservation, from_plain
from services.executor.request_tag import Begun, to_extra_args, with_begun
from services.executor.settings import ExecutorSettings
from services.pacing.types import ServiceLevel

BLOCK_SIZE = 32
NUM_BLOCKS = 64


def scheduler_config(**settings: Any) -> Any:
    """Return the configuration of an engine that runs no model."""
    return make_config(
        ExecutorSettings(
            model=str(exactness_model()),
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,  # requests would need block hashes
            **settings,
        )
    )


@contextmanager
def making(kind: type, config: Any, *, num_blocks: int = NUM_BLOCKS) -> Iterator[Any]:
    """Yield a scheduler with one group of layers."""
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    with set_current_vllm_config(config):
        yield kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )


def make_request(
    request_id: str,
    level: ServiceLevel | None,
    *,
    num_prompt_tokens: int = 40,
    num_output_tokens: int = 8,
    begun: Begun | None = None,
    **sampling: Any,
) -> Request:
    extra_args = None if level is None else to_extra_args(level)
    if begun is not None:
        extra_args = with_begun(extra_args or {}, begun, reads=True)
    return Request(
        request_id=request_id,
        prompt_token_ids=[0] * num_prompt_tokens,
        sampling_params=SamplingParams(
            max_tokens=num_output_tokens, extra_args=extra_args, **sampling
        ),
        pooling_params=None,
    )


def run_step(scheduler: Any) -> list[str]:
    """Schedule a step and pretend that a model ran it, with token 7 for all who get one.

    Returns who was part of it.
    """
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    is_prompt = [
        one.num_computed_tokens < one.num_tokens for one in requests
    ]  # after the step, too
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[] if more else [7] for more in is_prompt],
        ),
    )
    return ids


def observed(scheduler: Any) -> dict[str, RequestObservation]:
    requests = from_plain(scheduler.observe()).requests
    return {request.request_id: request for request in requests}


def holding(scheduler: Any, request_id: str) -> HoldingRequest:
    """Return where a request's KV is."""
    requests = kv_holders.from_plain(scheduler.kv_holders(9)).requests
    return next(request for request in requests if request.request_id == request_id)
