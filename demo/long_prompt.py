"""A prompt whose KV does not fit the pool, and what layer-wise KV did while it was answered."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from cli.client.answer import PacedAnswer, stream_answer
from cli.local.settings import StackSettings
from demo.kv_figures import KVFigures, read_figures
from demo.questions import question
from demo.texts import QUESTION, long_text

SECONDS_PER_LOOK = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAnswer:
    """The answer, and the executor's figures before, during and after it."""

    answer: PacedAnswer
    before: KVFigures
    during: KVFigures
    after: KVFigures

    def report(self) -> str:
        """Say what happened to the KV."""
        during = self.during
        num_groups = during.num_resident + during.num_offloaded
        needed = num_groups * -(-self.answer.num_prompt_tokens // during.block_size)
        loaded_mb = (self.after.h2d_bytes - self.before.h2d_bytes) / 1e6
        saved_mb = (self.after.d2h_bytes - self.before.d2h_bytes) / 1e6
        stalled_ms = (self.after.stall_s - self.before.stall_s) * 1e3
        return (
            f"prompt                {self.answer.num_prompt_tokens} tokens: {needed} KV blocks, "
            f"in a pool of {during.pool_blocks}\n"
            f"layer groups          {during.num_resident} resident, "
            f"{during.num_offloaded} offloaded\n"
            f"bytes moved           {loaded_mb:.1f} MB from host memory, {saved_mb:.1f} MB to it\n"
            f"layers waited         {stalled_ms:.0f} ms for copies, in "
            f"{self.answer.num_tokens} tokens"
        )


def show_long_prompt(settings: StackSettings, rate_tps: float, num_tokens: int) -> LongAnswer:
    """Ask behind a long text, print the answer as it comes."""
    before, answered = read_figures(settings), Event()
    with ThreadPoolExecutor(1) as thread:  # beside the reading, which must not wait for it
        during = thread.submit(_figures_with_offloaded, settings, answered)
        try:
            answer = stream_answer(
                settings.base_url,
                settings.model_id,
                question(QUESTION, context=long_text(), max_tokens=num_tokens),
                rate_tps=rate_tps,
                show=lambda piece: print(piece, end="", flush=True),
            )
        finally:
            answered.set()
    return LongAnswer(
        answer=answer, before=before, during=during.result(), after=read_figures(settings)
    )


def _figures_with_offloaded(settings: StackSettings, answered: Event) -> KVFigures:
    """Return the first figures with offloaded layers; the last ones if there are none."""
    while True:
        figures = read_figures(settings)
        if figures.num_offloaded or answered.wait(SECONDS_PER_LOOK):
            return figures
