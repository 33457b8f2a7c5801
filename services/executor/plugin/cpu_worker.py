"""The workers on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from services.executor.engine.parent_watch import end_with_parent
from services.executor.plugin import draft_sampling, latent_memo, resumed_rows
from services.executor.plugin.attention_memo import build_once, install_memo, is_of_one_kind
from services.executor.plugin.block_tables import StackedBlockTables
from services.executor.plugin.cpu_executor import nap_between_looks
from services.executor.plugin.spec import LatentGroupSpec
from services.executor.plugin.worker import LayerwiseWorkerMixin


class EvenflowCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, on every processor, and with no request stopped for another's sake.

    A seeded request whose prompt comes in chunks: vLLM samples a token after each, drops it, and
    turns the request's generator back, which a CPU's cannot do, and the engine dies. Here such a
    row draws from the common generator. A sampled request with drafts, which makes all tokens of
    its step wrong (`draft_sampling.py`). And the first request with log-probabilities: vLLM
    compiles a function for it, seconds in which no step runs. Eager means eager here.
    """

    def init_device(self) -> None:
        end_with_parent()
        nap_between_looks()
        allow_tiles()
        draft_sampling.repair()
        resumed_rows.install(self.vllm_config)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        if self.model_config.enforce_eager:
            torch.compiler.set_stance("force_eager")
        return super().load_model(*args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with _generators_of_dropped_tokens_away(self.model_runner):
            return super().sample_tokens(grammar_output)


class LayerwiseCPUWorker(LayerwiseWorkerMixin, EvenflowCPUWorker):
    """The same with layer groups, where vLLM has no kernels that make many of them cheap."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        install_memo()
        latent_memo.install_memo()
        return super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        batch = self.model_runner.input_batch
        tables = batch.block_table.block_tables
        if len(tables) > 1 and len({table.block_table.np.shape for table in tables}) == 1:
            batch.block_table = StackedBlockTables(batch.block_table)
            groups = kv_cache_config.kv_cache_groups
            has_latents = isinstance(groups[0].kv_cache_spec, LatentGroupSpec)
            if is_of_one_kind(groups) and not has_latents:
                build_once(self.model_runner)


def allow_tiles() -> None:
    """Ask the kernel for this process's right to AMX tiles, which vLLM's attention uses unasked.

    Linux gives tile registers to a process that asks (ARCH_REQ_XCOMP_PERM of arch_prctl(2)); one
    that uses them without dies of SIGILL. In vLLM only oneDNN asks, for large products: a
    small bfloat16 model dies at its first request. Where the kernel says no, vLLM is told that
    there are no tiles.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False


@contextmanager
def _generators_of_dropped_tokens_away(runner: Any) -> Iterator[None]:
    """Take the generators out of the batch whose rows' tokens this step will drop."""
    batch = runner.input_batch
    dropped = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    away = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
    try:
        yield
    finally:
        batch.generators.update(away)
