"""Which graph a step replays: vLLM's own dispatch of both model runners, without a device."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_worker import Worker

from services.executor.plugin import worker as plugin_worker
from services.executor.plugin.full_graphs import forbid_full_graphs_v1, forbid_full_graphs_v2
from services.executor.plugin.gpu_worker import LayerwiseGPUWorker
from services.executor.step_messages import SaveOrder, StepTransfers

pytestmark = pytest.mark.filterwarnings("default")

SIZES = [1, 2, 4, 8]
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def config_of(mode: CUDAGraphMode) -> Any:
    compilation = CompilationConfig(
        mode=3,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=SIZES,
        splitting_ops=list(CompilationConfig._attention_ops),
    )
    compilation.max_cudagraph_capture_size = SIZES[-1]
    compilation.post_init_cudagraph_sizes()
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=SIZES[-1]),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        lora_config=None,
        num_speculative_tokens=0,
    )


class Runners:
    """The graphs of both model runners, as after their capture, and whether a step has hooks."""

    def __init__(self, *, varlen: bool = False) -> None:
        config = config_of(CUDAGraphMode.FULL_AND_PIECEWISE)
        self.needs_hooks = False
        self.first = CudagraphDispatcher(config)
        self.first.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
        forbid_full_graphs_v1(self.first, lambda: self.needs_hooks)
        self.second: Any = object.__new__(CudaGraphManager)
        self.second.vllm_config, self.second.compilation_config = config, config.compilation_config
        self.second.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        self.second.max_num_reqs, self.second.decode_query_len = SIZES[-1], 1
        self.second.varlen_decode, self.second.ubatch_runner = varlen, None
        self.second.lora_capture_cases = [0]
        self.second._lora_dispatch_map, self.second._max_lora_case = {}, 0
        self.second._candidates, self.second._capture_descs = {}, {}
        self.second._init_candidates()
        self.second._graphs_captured = True
        forbid_full_graphs_v2(self.second, lambda: self.needs_hooks)

    def modes(self, num_reqs: int, *, query_len: int = 1) -> tuple[CUDAGraphMode, CUDAGraphMode]:
        """Return what either runner replays for requests with so many tokens each."""
        num_tokens, decodes = num_reqs * query_len, query_len == 1
        first, _ = self.first.dispatch(
            num_tokens=num_tokens,
            has_lora=False,
            uniform_decode=decodes,
            num_active_loras=0,
            valid_modes=None,
            invalid_modes=None,
        )
        second = self.second.dispatch(
            num_reqs,
            num_tokens,
            query_len if decodes else None,
            num_active_loras=0,
            max_query_len=query_len if decodes else None,
        )
        return first, second.cg_mode


@pytest.mark.parametrize("varlen", [False, True])
def test_decodes_replay_full_graphs_but_for_steps_that_need_hooks(varlen: bool) -> None:
    runners = Runners(varlen=varlen)
    for num_reqs in (1, 3, 8):
        runners.needs_hooks = False
        assert runners.modes(num_reqs) == (FULL, FULL)
        runners.needs_hooks = True
        assert runners.modes(num_reqs) == (PIECEWISE, PIECEWISE)


def test_prompts_and_large_batches_replay_what_they_would_anyway() -> None:
    runners = Runners()
    for runners.needs_hooks in (False, True):
        assert runners.modes(1, query_len=5) == (PIECEWISE, PIECEWISE)
        assert runners.modes(3, query_len=5) == (NONE, NONE)


@pytest.mark.parametrize(
    ("transfers", "needed"),
    [
        (StepTransfers(step=1), False),
        (StepTransfers(step=1, loading=["r"]), True),
        (StepTransfers(step=1, saves=[SaveOrder("r", 0, [0], [0], [1], False)]), False),
        (StepTransfers(step=1, saves=[SaveOrder("r", 0, [0], [0], [1], True)]), True),
        (None, False),  # warm-up
    ],
)
def test_hooks_are_needed_where_layers_load_or_write_staging_that_is_saved(
    monkeypatch: pytest.MonkeyPatch, transfers: StepTransfers | None, needed: bool
) -> None:
    seen = []
    connector = SimpleNamespace(runner=SimpleNamespace(take_in=lambda transfers: []))
    monkeypatch.setattr(plugin_worker, "get_kv_transfer_group", lambda: connector)
    worker: Any = object.__new__(LayerwiseGPUWorker)
    worker.use_v2_model_runner = True
    monkeypatch.setattr(
        Worker, "execute_model", lambda self, output: seen.append(self._needs_hooks)
    )

    worker.execute_model(SimpleNamespace(kv_connector_metadata=transfers))

    assert seen == [needed]


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("needs_hooks", [False, True])
def test_a_worker_rules_over_its_runners_graphs_once_they_are_captured(
    monkeypatch: pytest.MonkeyPatch, *, is_second: bool, needs_hooks: bool
) -> None:
    asked: list[Any] = []
    graphs = SimpleNamespace(dispatch=lambda *args, **kwargs: asked.append((*args, kwargs)))
    connector = SimpleNamespace(start_pinning=lambda: None)
    monkeypatch.setattr(plugin_worker, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda self: graphs.dispatch("capture"))
    worker: Any = object.__new__(LayerwiseGPUWorker)
    worker.use_v2_model_runner = is_second
    name = "cudagraph_manager" if is_second else "cudagraph_dispatcher"
    worker.model_runner = SimpleNamespace(**{name: graphs})

    worker.compile_or_warm_up_model()
    worker._needs_hooks = needs_hooks
    if is_second:
        graphs.dispatch(3, 3, 1, num_active_loras=0, max_query_len=1)
        length = None if needs_hooks else 1
        step = (3, 3, length, {"num_active_loras": 0, "max_query_len": length})
    else:
        graphs.dispatch(num_tokens=3)
        step = ({"num_tokens": 3, "invalid_modes": {FULL} if needs_hooks else None},)

    assert asked == [("capture", {}), step]
