"""Four readers at once, behind prompts that the KV pool does not hold together."""

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from demo.answer import PacedAnswer, Question, num_late, stream_answer
from demo.engine_view import display_for
from demo.engine_watch import EngineWatch
from demo.questions import context_texts, topics
from demo.settings import StackSettings
from services.pacing.attainment import DELIVERY_TOLERANCE_S, tpot_s

UPDATES_PER_S = 8.0
NUM_CONTEXT_CHARS = 2_400  # some 700 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who asks, and how fast they read."""

    name: str
    rate_tps: float  # tokens per second
    topic: int  # index into `topics()`


READERS = (
    Reader(name="slow", rate_tps=8.0, topic=1),
    Reader(name="steady", rate_tps=12.0, topic=5),
    Reader(name="quick", rate_tps=16.0, topic=12),
    Reader(name="hasty", rate_tps=20.0, topic=0),
)


def show_readers(settings: StackSettings) -> str:
    """Show the engine while the readers read; return what each of them got."""
    watch = EngineWatch(settings.address("executor"), updates_per_s=UPDATES_PER_S)
    display = display_for()
    waiting = set(READERS)

    def leave(reader: Reader, answer: Future[PacedAnswer]) -> None:
        waiting.discard(reader)
        if not waiting:
            watch.stop()

    with ThreadPoolExecutor(len(READERS)) as threads:
        answers: list[Future[PacedAnswer]] = []
        for reader in READERS:
            answers.append(threads.submit(_ask, settings, reader))
            answers[-1].add_done_callback(partial(leave, reader))
        try:
            for state in watch.states():
                display.show(state)
        finally:
            display.close()
    results = zip(READERS, [answer.result() for answer in answers], strict=True)
    return "\n".join(_line(reader, answer) for reader, answer in results)


def _ask(settings: StackSettings, reader: Reader) -> PacedAnswer:
    """Ask behind a text of the reader's own."""
    text = "\n".join(context_texts())
    start = NUM_CONTEXT_CHARS * READERS.index(reader)
    question = Question(
        text=topics()[reader.topic].questions[0],
        context=text[start : start + NUM_CONTEXT_CHARS],
        request_id=f"{reader.name}-{secrets.token_hex(2)}",
    )
    return stream_answer(
        settings.base_url,
        settings.model_id,
        question,
        rate_tps=reader.rate_tps,
        show=lambda piece: None,
    )


def _line(reader: Reader, answer: PacedAnswer) -> str:
    mean_gap_s = tpot_s(answer.arrived_s)
    rate = "-" if mean_gap_s is None else f"{1 / mean_gap_s:.1f}"
    return (
        f"{reader.name:<8}{answer.num_prompt_tokens} tokens of prompt, {answer.num_tokens} of "
        f"answer, {rate} tokens/s of {reader.rate_tps:g}; "
        f"{num_late(answer.arrived_s, 1 / reader.rate_tps)} came more than "
        f"{DELIVERY_TOLERANCE_S * 1e3:.0f} ms after their turn"
    )
