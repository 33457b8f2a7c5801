"""Our schedulers on real scheduler state, without an engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from services.executor.engine_config import make_config
from services.executor.kv.scheduler import EvenflowAsyncScheduler, EvenflowScheduler
from services.executor.service_level import NO_TAG, RequestTag, to_extra_args
from services.executor.settings import ExecutorSettings
from services.pacing.types import ServiceLevel
from tests.models import exactness_model

BLOCK_SIZE = 32
NUM_BLOCKS = 64
TAG = RequestTag(service_level=ServiceLevel(slo_tbt_s=0.2), generation=2)


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config(
        ExecutorSettings(
            model=str(exactness_model()),
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,  # requests would need block hashes
        )
    )


@pytest.fixture(params=[EvenflowScheduler, EvenflowAsyncScheduler])
def scheduler(request: pytest.FixtureRequest, config: Any) -> Iterator[Scheduler]:
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    with set_current_vllm_config(config):
        yield request.param(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=NUM_BLOCKS,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )


def make_request(request_id: str, tag: RequestTag | None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[0] * 40,
        sampling_params=SamplingParams(
            max_tokens=8, extra_args=None if tag is None else to_extra_args(tag)
        ),
        pooling_params=None,
    )


def test_the_configuration_names_the_scheduler_that_this_platform_takes(config: Any) -> None:
    is_async = config.scheduler_config.async_scheduling
    expected = EvenflowAsyncScheduler if is_async else EvenflowScheduler

    assert config.scheduler_config.get_scheduler_cls() is expected


def test_a_tag_is_kept_from_arrival_to_end(scheduler: Any) -> None:
    scheduler.add_request(make_request("tagged", TAG))
    scheduler.add_request(make_request("plain", None))
    assert scheduler.request_tags == {"tagged": TAG, "plain": NO_TAG}

    scheduler.schedule()
    scheduler.check_integrity()
    assert scheduler.request_tags["tagged"] == TAG

    scheduler.finish_requests("tagged", RequestStatus.FINISHED_ABORTED)
    scheduler.check_integrity()
    assert scheduler.request_tags == {"plain": NO_TAG}


def test_a_waiting_request_that_is_aborted_leaves_no_tag(scheduler: Any) -> None:
    scheduler.add_request(make_request("waiting", TAG))
    scheduler.finish_requests(["waiting"], RequestStatus.FINISHED_ABORTED)

    assert scheduler.request_tags == {}
    scheduler.check_integrity()
