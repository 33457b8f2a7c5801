"""`evenflow chat` and `evenflow bench` as a user calls them, on a real gateway."""

import asyncio
import json
import os
import pty
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from lab.models import exactness_model
from services.kit.rpc import name_of_request
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client, gateway_for

ROOT = Path(__file__).resolve().parents[2]
CALL = "from cli.main import main; main(prog_name='evenflow')"
# The terminal becomes the one that Ctrl-C comes from.
CALL_ON_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {CALL}"
INTERRUPT, END = b"\x03", b"\x04"  # Ctrl-C, Ctrl-D
PROMPT = "> "
TERMINAL_TIMEOUT_S = 300.0  # with the start of a Python process

pytestmark = pytest.mark.timeout(1_200)  # vLLM and its tokenizers are imported


class WatchedExecutor(FakeExecutor):
    """Shows every request with the same counts, three tokens generated and two in deposit."""

    async def WatchRequests(  # noqa: N802
        self, request: pb.WatchRequestsRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.WatchRequestsResponse]:
        async with self._news:
            while True:
                yield pb.WatchRequestsResponse(
                    requests=[
                        pb.ObservedRequest(
                            request_id=submit.request_id,
                            state=pb.REQUEST_STATE_DECODING,
                            num_generated_tokens=3,
                            num_deposited_tokens=2,
                        )
                        for submit in self.submits
                    ]
                )
                await self._news.wait()


@pytest.fixture
async def executor() -> AsyncIterator[WatchedExecutor]:
    executor = WatchedExecutor()
    await executor.start()
    yield executor
    await executor.kill()


@pytest.fixture
async def client(executor: WatchedExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


def environment() -> dict[str, str]:
    """Return one without settings of a stack that may be running, but with a wish for colours."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return inherited | {
        "PYTHONPATH": paths,
        "FORCE_COLOR": "1",
        "TERM": "xterm",
        "EVENFLOW_STATE_DIR": "/nonexistent",
    }


async def call(*arguments: str, said: str = "") -> tuple[int | None, str, str]:
    """Run `evenflow` with its input piped; return its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALL, *arguments,
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate(said.encode())
    return process.returncode, out.decode(), errors.decode()


class Terminal:
    """A terminal that a command runs in: what it shows, and somebody who types."""

    def __init__(self, leader: int, shown: asyncio.StreamReader) -> None:
        self._leader = leader
        self._new = shown
        self.shown = ""

    def type(self, keys: str | bytes) -> None:
        os.write(self._leader, keys.encode() if isinstance(keys, str) else keys)

    async def until(self, text: str) -> None:
        """Wait until `text` is shown after what was waited for before."""
        async with asyncio.timeout(TERMINAL_TIMEOUT_S):
            while text not in self.shown:
                self.shown += (await self._new.read(4096)).decode()
        self.shown = self.shown[self.shown.index(text) + len(text) :]


@asynccontextmanager
async def on_terminal(
    *arguments: str,
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """Run `evenflow` on a terminal of its own."""
    leader, follower = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALL_ON_TERMINAL, *arguments,
        env=environment(),
        stdin=follower, stdout=follower, stderr=follower,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(shown), os.fdopen(leader, "rb", buffering=0)
    )
    try:
        yield Terminal(leader, shown), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        pipe.close()


def saved_result(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def chat_arguments(client: Client, executor: FakeExecutor) -> Sequence[str]:
    return ("chat", "--url", client.base_url, "--executor", executor.address, "--rate", "1000")


def asked(submit: pb.Submit) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in submit.chat.messages]


async def test_piped_questions_get_answers_and_summaries_without_control_codes(
    client: Client, executor: WatchedExecutor
) -> None:
    code, out, errors = await call(
        *chat_arguments(client, executor), "--seed", "7", said="One?\n\nTwo?\n/new\nThree?\n"
    )

    assert (code, errors) == (0, "")
    assert "\x1b" not in out
    assert out.count("Hello, world\nTTFT ") == 3
    assert out.count(" 3 tokens, ") == 3
    answered = [("user", "One?"), ("assistant", "Hello, world")]
    assert [asked(submit) for submit in executor.submits] == [
        [("user", "One?")],
        [*answered, ("user", "Two?")],
        [("user", "Three?")],
    ]
    sampling, level = executor.submits[0].sampling, executor.submits[0].service_level
    assert (sampling.temperature, sampling.top_p) == pytest.approx((0.2, 0.9))
    assert sampling.repetition_penalty == pytest.approx(1.1)
    assert (sampling.seed, sampling.max_tokens) == (7, 400)
    assert (level.consumption_rate_tps, level.pace_tail) == (1000.0, True)


async def test_a_rate_of_zero_asks_for_no_pace(client: Client, executor: WatchedExecutor) -> None:
    code, out, _ = await call(*chat_arguments(client, executor), "--rate", "0", said="One?\n")

    assert code == 0
    assert "Hello, world" in out
    assert "late" not in out
    assert not executor.submits[0].service_level.HasField("consumption_rate_tps")
    assert not executor.submits[0].service_level.pace_tail


async def test_an_answer_is_shorter_where_the_context_leaves_less(
    client: Client, executor: WatchedExecutor
) -> None:
    no_room = pb.Rejected(code=pb.REJECT_CODE_CONTEXT_LENGTH, field="max_tokens", message="full")
    executor.script_for = lambda submit: (
        Script(reject=no_room) if submit.sampling.HasField("max_tokens") else Script()
    )

    code, out, errors = await call(*chat_arguments(client, executor), said="One?\n")

    assert (code, errors) == (0, "")
    assert "Hello, world" in out


async def test_a_refusal_is_told_in_a_line_and_the_conversation_goes_on(
    client: Client, executor: WatchedExecutor
) -> None:
    full = pb.Rejected(code=pb.REJECT_CODE_CONTEXT_LENGTH, field="messages", message="too long")
    executor.script_for = lambda submit: (
        Script(reject=full) if asked(submit)[-1] == ("user", "Two?") else Script()
    )

    code, out, errors = await call(*chat_arguments(client, executor), said="One?\nTwo?\nThree?\n")

    assert code == 0
    assert errors == "HTTP 400: too long (/new starts anew)\n"
    assert out.count("Hello, world") == 2
    assert len(asked(executor.submits[2])) == 3  # what was refused is not part of it


async def test_on_a_terminal_a_line_below_the_answer_says_how_far_it_is(
    client: Client, executor: WatchedExecutor
) -> None:
    executor.script.ending.clear()
    async with on_terminal(*chat_arguments(client, executor)) as (terminal, process):
        await terminal.until(f"{MODEL} at {client.base_url}")
        await terminal.until(PROMPT)
        terminal.type("One?\n")
        await terminal.until("read 3  generated 3  in deposit 2")
        executor.script.ending.set()
        await terminal.until("Hello, world")
        await terminal.until("3 tokens, ")
        await terminal.until(PROMPT)
        terminal.type("/quit\n")

        assert await process.wait() == 0


async def test_the_line_does_without_an_executor_that_cannot_be_watched(client: Client) -> None:
    unwatched = ("chat", "--url", client.base_url, "--executor", "127.0.0.1:9", "--rate", "1000")
    async with on_terminal(*unwatched) as (terminal, process):
        await terminal.until(PROMPT)
        terminal.type("One?\n")
        await terminal.until("read 3  gap")
        await terminal.until("3 tokens, ")
        await terminal.until(PROMPT)
        terminal.type(END)

        assert await process.wait() == 0


async def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    client: Client, executor: WatchedExecutor
) -> None:
    executor.script.ending.clear()
    async with on_terminal(*chat_arguments(client, executor)) as (terminal, process):
        await terminal.until(PROMPT)
        terminal.type("One?\n")
        await terminal.until("read 3")
        terminal.type(INTERRUPT)
        await terminal.until("stopped")
        await executor.until(lambda: len(executor.aborted) == 1)
        executor.script = Script(texts=["And on"])
        await terminal.until(PROMPT)
        terminal.type(INTERRUPT)  # between answers it ends nothing
        terminal.type("\n")  # Python may begin to wait for keys with the signal still to be seen
        await terminal.until(PROMPT)
        terminal.type("Two?\n")
        await terminal.until("1 token, ")
        await terminal.until(PROMPT)
        terminal.type(END)

        assert await process.wait() == 0
    assert asked(executor.submits[1]) == [
        ("user", "One?"),
        ("assistant", "Hello, world"),
        ("user", "Two?"),
    ]


async def test_the_benchmark_has_readers_and_says_what_they_felt(
    client: Client, executor: WatchedExecutor, tmp_path: Path
) -> None:
    executor.script = Script(texts=["a", "", "b"])  # one token without text
    executor.script_for = lambda submit: (
        Script(failure=pb.Failure())
        if name_of_request(submit.request_id).endswith("-5")
        else executor.script
    )

    code, out, errors = await call(
        "bench", "--base-url", client.base_url, "--tokenizer", str(exactness_model()),
        "--num-prompts", "6", "--max-concurrency", "1", "--reading-rates", "500,1000",
        "--slo-ttft-ms", "60000", "--random-input-len", "16", "--disable-tqdm",
        "--save-result", "--result-dir", str(tmp_path),
    )  # fmt: skip

    assert code == 0, out + errors
    assert "Serving Benchmark Result" in out
    levels = [submit.service_level for submit in executor.submits]
    assert [level.consumption_rate_tps for level in levels] == [500.0, 1000.0] * 3
    assert {(level.pace_tail, level.slo_ttft_s) for level in levels} == {(True, 60.0)}
    result = saved_result(tmp_path)
    rows = {row["readers"]: row for row in result["evenflow"]["felt"]}
    assert {name: row["num_requests"] for name, row in rows.items()} == {
        "500": 3, "1000": 2, "all": 5,
    }  # fmt: skip
    assert rows["all"]["ttft_in_time_frac"] == 1.0
    assert result["evenflow"]["num_untimed_tokens"] == 0
    assert (result["completed"], result["failed"]) == (5, 1)
    felt = out[out.index("What The Readers Felt") :]
    assert [line.split()[:2] for line in felt.splitlines()[3:6]] == [
        ["500", "3"], ["1000", "2"], ["all", "5"],
    ]  # fmt: skip
    assert "1 failed; the first: the engine gave up" in felt


async def test_the_benchmark_counts_tokens_that_no_event_told_of(
    client: Client, executor: WatchedExecutor
) -> None:
    executor.script = Script(texts=["a", "", "b"])

    code, out, errors = await call(
        "bench", "--base-url", client.base_url, "--tokenizer", str(exactness_model()),
        "--num-prompts", "2", "--backend", "openai", "--reading-rates", "0", "--disable-tqdm",
    )  # fmt: skip

    assert code == 0, out + errors
    assert not executor.submits[0].sampling.HasField("logprobs")
    assert "2 of 6 tokens had no event of their own: not counted." in out
    assert "unpaced" in out
