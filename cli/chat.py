"""`evenflow chat`: a conversation in the terminal, at the pace at which it is read."""

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from cli.client.answer import (
    DEFAULT_MAX_TOKENS,
    AnswerError,
    AnswerStream,
    PacedAnswer,
    Question,
    Sampling,
    num_late,
)
from cli.client.endpoint import Endpoint, RefusedError, endpoint_at
from cli.interrupts import heard
from cli.live_line import Progress, display_for, watched
from cli.local.settings import BadSettingError, read_settings
from cli.local.stacks import NoStackError, some_stack
from services.pacing.attainment import tpot_s

# What keeps a small model from repeating itself.
TEMPERATURE = 0.2
TOP_P = 0.9
REPETITION_PENALTY = 1.1

PROMPT = "> "
NEW, QUIT = "/new", "/quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the command was given; empty stands for the local stack's own."""

    rate: float  # tokens/s that are read; 0: unpaced
    url: str | None
    model: str | None
    system: str
    max_tokens: int
    temperature: float
    seed: int | None
    api_key: str = field(repr=False)
    executor: str | None  # gRPC address
    name: str | None  # of a local stack

    @property
    def rate_tps(self) -> float | None:
        return self.rate or None


@click.command("chat")
@click.option(
    "--rate",
    type=click.FloatRange(0),
    default=12.0,
    show_default=True,
    help="Tokens per second that you read; 0: as fast as they come.",
)
@click.option("--url", help="Of the server; the local stack's.")
@click.option("--model", help="Its id; the first one that is served.")
@click.option("--system", default="", help="What the model is told before the conversation.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Of each answer, where the context leaves them.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=TEMPERATURE,
    show_default=True,
    help="0: the likeliest token, always.",
)
@click.option("--seed", type=int, help="Makes answers repeatable.")
@click.option(
    "--api-key",
    default="",
    envvar="OPENAI_API_KEY",
    show_envvar=True,
    help="Where the server asks for one.",
)
@click.option(
    "--executor",
    metavar="HOST:PORT",
    help="gRPC address that tells what is generated; the local stack's.",
)
@click.option("--name", help="Of a local stack; needed where several run.")
def command(**options: Any) -> None:
    """Talk with a served model: one question a line. /new starts anew, /quit or Ctrl-D ends,
    Ctrl-C stops an answer."""
    try:
        _chat(ChatOptions(**options))
    except (AnswerError, BadSettingError, NoStackError) as error:
        raise click.ClickException(str(error)) from error


class Conversation:
    """Questions and answers so far, with one model."""

    def __init__(self, endpoint: Endpoint, model: str, options: ChatOptions) -> None:
        self._endpoint = endpoint
        self._model = model
        self._options = options
        self.rate_tps = options.rate_tps
        self._messages: list[dict[str, str]] = []

    def begin_anew(self) -> None:
        self._messages.clear()

    def ask(self, text: str, request_id: str) -> AnswerStream:
        """Return an answer that is yet to be read; the conversation stays as it is."""
        question = self.question(text, request_id)
        return AnswerStream(self._endpoint, self._model, question, rate_tps=self.rate_tps)

    def question(self, text: str, request_id: str) -> Question:
        options = self._options
        return Question(
            text=text,
            context=options.system,
            messages=tuple(self._messages),
            sampling=Sampling(
                temperature=options.temperature,
                top_p=TOP_P,
                repetition_penalty=REPETITION_PENALTY,
                seed=options.seed,
            ),
            max_tokens=options.max_tokens,
            request_id=request_id,
        )

    def add(self, question: str, answer: str) -> None:
        self._messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]


def summary_line(answer: PacedAnswer, rate_tps: float | None) -> str:
    """Return what the reader got, on one line."""
    plural = "" if answer.num_tokens == 1 else "s"
    parts = [f"TTFT {answer.ttft_s * 1e3:.0f} ms"]
    if answer.num_thoughts:
        read_after = "-" if answer.ttfat_s is None else f"{answer.ttfat_s * 1e3:.0f} ms"
        parts.append(f"of the answer {read_after}")
    parts.append(f"{answer.num_tokens} token{plural}")
    if answer.num_thoughts:
        parts.append(f"{answer.num_thoughts} of them thoughts")
    mean_gap_s = tpot_s(answer.read_s)
    if mean_gap_s:
        asked = "" if rate_tps is None else f" of {rate_tps:g}"
        parts.append(f"{1 / mean_gap_s:.1f} tokens/s{asked}")
    if rate_tps is not None:
        parts.append(f"{num_late(answer.read_s, 1 / rate_tps)} late")
    if answer.num_cached_tokens:
        parts.append(
            f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached"
        )
    if answer.finish_reason == "length":
        parts.append("cut off")
    return ", ".join(parts)


def _chat(options: ChatOptions) -> None:
    elsewhere = options.url and not options.name
    settings = read_settings() if elsewhere else some_stack(options.name)
    endpoint = endpoint_at(options.url or settings.base_url, options.api_key)
    served = endpoint.models()
    model = options.model or next(iter(served), None)
    if model is None:
        raise AnswerError(f"{endpoint.base_url} serves no model yet")
    # Whatever the environment says of colours, nothing but text goes into a pipe.
    console = Console(highlight=False, force_terminal=_is_interactive())
    if console.is_terminal:
        _say(console, f"{model} at {endpoint.base_url}; /new starts anew, /quit ends")
    conversation = Conversation(endpoint, model, options)
    executor = options.executor or settings.address("executor")
    for line in _lines(console):
        if line == QUIT:
            break
        if line == NEW:
            conversation.begin_anew()
        elif line:
            _answer(console, conversation, line, executor)


def _answer(console: Console, conversation: Conversation, text: str, executor: str) -> None:
    """Ask and show; the conversation goes on whatever happens to this answer."""
    request_id = f"chat-{secrets.token_hex(4)}"
    stream = conversation.ask(text, request_id)
    problem = ""
    try:
        with heard():
            _read(console, stream, watched_at=(executor, request_id))
    except KeyboardInterrupt:
        if not console.is_terminal:
            raise
        problem = "stopped"
    except AnswerError as error:
        is_full = isinstance(error, RefusedError) and error.param == "messages"
        problem = f"{error} ({NEW} starts anew)" if is_full else str(error)
    if stream.is_begun:
        answer = stream.answer()
        conversation.add(text, answer.text)
        _say(console, summary_line(answer, conversation.rate_tps))
    elif not problem:
        problem = "the answer is empty"
    if problem:
        _complain(console, problem)
    console.print()


def _read(console: Console, stream: AnswerStream, *, watched_at: tuple[str, str]) -> None:
    """Show an answer as it comes; `watched_at` is its executor and request id."""
    progress = Progress(sent_s=time.monotonic())
    with ExitStack() as stack:
        display = display_for(console, progress)
        stack.callback(display.close)
        if console.is_terminal:
            stack.enter_context(watched(*watched_at, progress.see))
        for piece in stack.enter_context(closing(stream.pieces())):
            progress.take(piece)
            display.show(piece.text)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _lines(console: Console) -> Iterator[str]:
    """Yield what the user says, a line at a time."""
    if not console.is_terminal:
        yield from (line.decode(errors="replace").strip() for line in sys.stdin.buffer)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` edits with it
    while True:
        try:
            yield input(PROMPT).strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _say(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"), soft_wrap=True)


def _complain(console: Console, text: str) -> None:
    if console.is_terminal:
        console.print(Text(text, style="red"), soft_wrap=True)
    else:
        print(text, file=sys.stderr, flush=True)
