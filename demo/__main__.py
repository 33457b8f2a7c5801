"""`python -m demo run|up|watch|down|logs`: the local stack."""

import subprocess
import sys
import time
from collections.abc import Callable

from demo import stack
from demo.answer import AnswerError, Question, stream_answer, summary
from demo.engine_view import display_for
from demo.engine_watch import EngineWatch, WatchError
from demo.long_prompt import show_long_prompt
from demo.model import demo_model
from demo.questions import ZEN_QUESTION
from demo.readers import READERS, UPDATES_PER_S, show_readers
from demo.settings import LOG_DIR, BadSettingError, StackSettings, read_settings
from demo.snippets import snippets

READING_RATE_TPS = 18.0  # a quick reader of English
SNIPPET_QUESTION = "What is the with statement?"


def up() -> StackSettings:
    """Build what is missing, start every process, wait until the stack answers."""
    settings = read_settings()
    model = settings.model or str(demo_model())
    started_s = time.monotonic()
    stack.start(settings, settings.environment(model))
    print(f"waiting for {settings.model_id}", flush=True)
    try:
        stack.wait_ready(
            settings, lambda status: _say(f"{time.monotonic() - started_s:5.1f} s  {status}")
        )
    except stack.StackError:
        stack.stop()
        raise
    _say(f"{time.monotonic() - started_s:5.1f} s  ready: {settings.base_url}")
    return settings


def run() -> None:
    """Bring the stack up, show paced answers and the engine, say how to ask for more."""
    settings = up()
    print(f"\n> {ZEN_QUESTION}\n")
    answer = stream_answer(
        settings.base_url,
        settings.model_id,
        Question(text=ZEN_QUESTION),
        rate_tps=READING_RATE_TPS,
        show=lambda piece: print(piece, end="", flush=True),
    )
    print(f"\n\n{summary(answer, rate_tps=READING_RATE_TPS)}\n")
    if not settings.model:
        print(f"> {ZEN_QUESTION}  (behind a text that does not fit the KV pool)\n")
        print(f"\n\n{show_long_prompt(settings)}\n")
        print(f"> {len(READERS)} readers at once, whose KV does not fit the pool together\n")
        print(f"\n{show_readers(settings)}\n")
    print(snippets(settings, SNIPPET_QUESTION))


def watch() -> None:
    """Show the running engine until interrupted."""
    engine = EngineWatch(read_settings().address("executor"), updates_per_s=UPDATES_PER_S)
    display = display_for()
    try:
        for state in engine.states():
            display.show(state)
    finally:
        display.close()


def down() -> None:
    print("stopped" if stack.stop() else "nothing was running")


def logs() -> None:
    """Follow every log until interrupted."""
    files = sorted(str(path) for path in LOG_DIR.glob("*.log"))
    if not files:
        raise stack.StackError("there are no logs yet: `make up` starts the stack")
    subprocess.run(["tail", "-n", "20", "-F", *files], check=False)


def _say(line: str) -> None:
    print(line, flush=True)


COMMANDS: dict[str, Callable[[], object]] = {
    "run": run,
    "up": up,
    "watch": watch,
    "down": down,
    "logs": logs,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m demo {'|'.join(COMMANDS)}")
    try:
        COMMANDS[sys.argv[1]]()
    except (stack.StackError, BadSettingError, AnswerError, WatchError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
