"""Programs that people use, which npm installs, against the gateway: they end as they should."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.client_session import Call, model_that_calls
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor
from tests.gateways import Client, gateway_for

NODE = Path(__file__).parent / "node"
MODULES = NODE / "node_modules"
CODEX = MODULES / ".bin" / "codex"
CLAUDE = MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"  # needs no install script
ANSWER = "Hello, world"
CONTEXTS = [8192, 32768]  # tokens
SAY_HI = "echo hi"
BASH = Call(name="Bash", arguments={"command": SAY_HI, "description": "Says hi."})
EXEC = Call(name="exec_command", arguments={"cmd": SAY_HI})
WEATHER = Call(name="weather", arguments={"city": "Oslo"})
SILENT = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
CODEX_CONFIG = """
model = "{model}"
model_provider = "evenflow"
model_reasoning_effort = "high"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.evenflow]
name = "Evenflow"
base_url = "{base_url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
# The sandbox of its commands needs rights that a test may lack; the command is the test's own.
UNBOXED = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

pytestmark = pytest.mark.skipif(not MODULES.exists(), reason=f"npm has not installed {NODE}")


@pytest.fixture(params=CONTEXTS)
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor(max_model_len=request.param)
    await executor.start()
    yield executor
    await executor.kill()


@pytest.fixture
async def client(executor: FakeExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


async def said_by(*command: str | Path, home: Path, **environment: str) -> str:
    """Run a program to its end, which must be a good one; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (printed + complaints).decode()
    return printed.decode()


@pytest.mark.parametrize("way", ["chat", "responses", "unstored", "compatible"])
async def test_the_ai_sdk_calls_a_tool_in_each_of_its_turns(
    executor, client, tmp_path, way
) -> None:
    executor.script_for = model_that_calls(WEATHER)

    script = NODE / "ai-sdk.mjs"
    printed = await said_by("node", script, way, client.base_url, MODEL, home=tmp_path)

    assert printed.splitlines() == [ANSWER] * 6
    assert len(executor.submits) == 12  # a call and an answer for each


@pytest.mark.parametrize("effort", [[], ["--effort", "high"]], ids=["default effort", "high"])
@pytest.mark.parametrize("has_tools", [True, False], ids=["tools", "no tools"])
async def test_claude_code_answers_and_goes_on(
    executor, client, tmp_path, effort, has_tools
) -> None:
    executor.script_for = model_that_calls(BASH)
    tools = ["--tools", "Bash", "--allowedTools", "Bash"] if has_tools else ["--tools", ""]
    environment = SILENT | {
        "ANTHROPIC_BASE_URL": client.base_url,
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    }

    for words in (["-p", "Say hi."], ["-c", "-p", "And again."]):
        command = ["node", CLAUDE, *words, *effort, *tools]
        assert (await said_by(*command, home=tmp_path, **environment)).strip() == ANSWER
    assert len(executor.submits) == (4 if has_tools else 2)


async def test_codex_answers_and_resumes(executor, client, tmp_path) -> None:
    executor.script_for = model_that_calls(EXEC)
    settings = tmp_path / ".codex"
    settings.mkdir()
    config = CODEX_CONFIG.format(model=MODEL, base_url=client.base_url)
    (settings / "config.toml").write_text(config)

    for words in (["Say hi."], ["resume", "--last", "And again."]):
        command = [CODEX, "exec", *UNBOXED, *words]
        assert (await said_by(*command, home=tmp_path)).strip() == ANSWER
    assert len(executor.submits) == 4
