"""A prompt whose KV does not fit the pool, and what layer-wise KV did while it was answered."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from demo.answer import PacedAnswer, Question, stream_answer
from demo.questions import ZEN_QUESTION, context_texts
from demo.settings import StackSettings

NUM_CONTEXT_CHARS = 6_000  # some 1,800 tokens
READING_RATE_TPS = 60.0  # more than the engine makes: the first answer has shown the pace
SCRAPE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFigures:
    """Layer-wise KV at one moment, from the executor's metrics."""

    pool_blocks: int  # of one layer group each
    block_size: int  # tokens
    h2d_bytes: float
    d2h_bytes: float
    stall_s: float
    num_resident: int  # layer groups of live requests
    num_offloaded: int


def show_long_prompt(settings: StackSettings) -> str:
    """Ask behind a long text; print the answer as it comes, return what happened to its KV."""
    before = read_figures(settings)
    during = before

    def show(piece: str) -> None:
        nonlocal during
        print(piece, end="", flush=True)
        if not during.num_offloaded:  # the first figures may be those of the step before
            during = read_figures(settings)

    answer = stream_answer(
        settings.base_url,
        settings.model_id,
        Question(text=ZEN_QUESTION, context="\n".join(context_texts())[:NUM_CONTEXT_CHARS]),
        rate_tps=READING_RATE_TPS,
        show=show,
    )
    return _report(answer, before, during, read_figures(settings))


def _report(answer: PacedAnswer, before: KVFigures, during: KVFigures, after: KVFigures) -> str:
    num_groups = during.num_resident + during.num_offloaded
    needed = num_groups * -(-answer.num_prompt_tokens // during.block_size)
    loaded_mb = (after.h2d_bytes - before.h2d_bytes) / 1e6
    saved_mb = (after.d2h_bytes - before.d2h_bytes) / 1e6
    stalled_s = after.stall_s - before.stall_s
    return (
        f"prompt                {answer.num_prompt_tokens} tokens: {needed} KV blocks, "
        f"in a pool of {during.pool_blocks}\n"
        f"layer groups          {during.num_resident} resident, {during.num_offloaded} offloaded\n"
        f"bytes moved           {loaded_mb:.1f} MB from host memory, {saved_mb:.1f} MB to it\n"
        f"layers waited         {stalled_s * 1e3:.0f} ms for copies, in {answer.num_tokens} tokens"
    )


def read_figures(settings: StackSettings) -> KVFigures:
    """Read the executor's metrics endpoint."""
    port = settings.ports["EVENFLOW_EXECUTOR_METRICS_PORT"]
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_TIMEOUT_S).text
    values: dict[str, float] = {}
    shape: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name.removeprefix("vllm:evenflow_kv_")] = sample.value
            if sample.name == "vllm:cache_config_info":
                shape = sample.labels
    return KVFigures(
        pool_blocks=int(shape["num_gpu_blocks"]),
        block_size=int(shape["block_size"]),
        h2d_bytes=values["h2d_bytes_total"],
        d2h_bytes=values["d2h_bytes_total"],
        stall_s=values["step_stall_s_sum"],
        num_resident=int(values["num_resident_groups"]),
        num_offloaded=int(values["num_offloaded_groups"]),
    )
