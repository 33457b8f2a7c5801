"""The product's scheduler, which is vLLM's, over a simulated rank: an engine without a model."""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lab.engine.orders import park
from lab.models import exactness_model
from services.executor.blocks.residency import RequestKV
from services.executor.engine.config import make_config
from services.executor.kv_options import KVOptions
from services.executor.plugin import spec
from services.executor.scheduler.scheduler import LayerwiseScheduler, LayerwiseSchedulerMixin
from services.executor.scheduler.shadows import SUFFIX
from services.executor.settings import ExecutorSettings
from services.executor.step_messages import StepFeedback, StepTransfers
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, SimulatedRank, Slice, keys_of

NUM_GROUPS = 4
MAX_MODEL_LEN = 400
TOKEN = 7  # what the model would say


@cache
def config_of_layerwise_kv() -> VllmConfig:
    return make_config(
        ExecutorSettings(
            model=str(exactness_model()), max_model_len=MAX_MODEL_LEN, layerwise_kv=True
        )
    )


def make_scheduler(
    *,
    num_blocks: int = 41,
    num_slots: int = 400,
    scheduler_cls: type[LayerwiseSchedulerMixin] = LayerwiseScheduler,
) -> LayerwiseSchedulerMixin:
    """Return a scheduler of requests that nobody plans for. `num_blocks`: one is vLLM's own."""
    spec.register()
    group = spec.LayerGroupSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    options = KVOptions(
        host_bytes=num_slots * group.page_size_bytes,
        predicted_output_tokens=64,
        poison=True,
    )
    config = config_of_layerwise_kv()
    config.additional_config = options.engine_args()["additional_config"]
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec([f"layer.{number}"], group) for number in range(NUM_GROUPS)]
    with set_current_vllm_config(config):
        return scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )


class ModelFreeEngine:
    """Schedules a step, runs it on the rank, and lets its copies end: `step`."""

    def __init__(self, **options: Any) -> None:
        """`options`: of `make_scheduler`."""
        self.scheduler = make_scheduler(**options)
        self.rank = SimulatedRank(NUM_GROUPS, random.Random(1))
        self.do_copies_end = True  # those for which no layer waits
        self.prompts: dict[str, tuple[str, ...]] = {}

    def add(self, request_id: str, num_tokens: int, prompt: tuple[str, ...] = ()) -> Request:
        """Let a request arrive that goes on until it is told to end.

        `prompt`: its first full blocks, which others may share.
        """
        request = make_request(request_id, num_tokens)
        request.block_hashes = keys_of(prompt)
        self.prompts[request_id] = prompt
        self.scheduler.add_request(request)
        return request

    def kv(self, request_id: str) -> RequestKV:
        """Return the KV of a request that has some."""
        kv = self.scheduler.records[request_id].kv
        assert kv is not None
        return kv

    def step(self) -> set[str]:
        """Return who ran."""
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        transfers = output.kv_connector_metadata
        assert isinstance(transfers, StepTransfers)
        self.take_in(output, self.run(transfers, slices_of(output, self.prompts)))
        self.scheduler.check_integrity()
        return set(output.num_scheduled_tokens)

    def take_in(self, output: SchedulerOutput, feedback: StepFeedback | None = None) -> None:
        """Tell the scheduler what a step has brought."""
        self.scheduler.update_from_output(output, self._tokens_of(output, feedback))

    def run(self, transfers: StepTransfers, batch: list[Slice]) -> StepFeedback:
        feedback = self.rank.run_step(transfers, batch)
        for _ in range(20 if self.do_copies_end else 0):
            self.rank.engine.progress()
        return feedback

    def step_of_copies(self) -> None:
        """Run a step without requests, whatever is waiting, and take in what it has copied."""
        transfers = self.scheduler.transfers
        transfers.absorb(self.run(transfers.plan_step({}), []))
        transfers.settle()

    def park(self, request_id: str) -> None:
        """Park a request, and step until it does not run."""
        park(self.scheduler, request_id)
        while request_id in names_of(self.scheduler.running):
            self.step()

    def _tokens_of(
        self, output: SchedulerOutput, feedback: StepFeedback | None
    ) -> ModelRunnerOutput:
        names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [TOKEN] if one.num_computed_tokens >= one.num_tokens else [] for one in requests
            ],
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=feedback),
        )


def make_request(request_id: str, num_tokens: int, *, arrival_time: float | None = None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[*range(num_tokens)],
        sampling_params=SamplingParams(max_tokens=1_000, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival_time,
    )


def slices_of(output: SchedulerOutput, prompts: Mapping[str, tuple[str, ...]]) -> list[Slice]:
    """Return a step's requests as ranks see them; `prompts` are blocks that others may share."""
    cached = output.scheduled_cached_reqs
    nothing: tuple[list[int], ...] = ([],) * NUM_GROUPS
    places: dict[str, tuple[int, Any, bool]] = {
        new.req_id: (new.num_computed_tokens, new.block_ids, True)
        for new in output.scheduled_new_reqs
    }
    for name, start, ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        places[name] = start, ids or nothing, name in cached.resumed_req_ids
    return [
        Slice(
            name,
            start,
            output.num_scheduled_tokens[name],
            ids,
            is_new=is_new,
            prompt=prompts.get(name.removesuffix(SUFFIX), ()),
            shadow_of=name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else "",
        )
        for name, (start, ids, is_new) in places.items()
    ]


def names_of(requests: Any) -> list[str]:
    return [request.request_id for request in requests]
