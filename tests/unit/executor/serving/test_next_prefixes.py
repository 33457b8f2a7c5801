"""What next turns begin with: rendered with the answer, computed while nothing waits."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.executor.engine.collector import DeltaSink
from services.executor.serving.next_prefixes import NextPrefixes, answer_of
from services.executor.types import (
    LOWEST_PRIORITY,
    Delta,
    Failure,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Resume,
    Submission,
    Token,
)
from services.generation.conversation import ChatMessage, ConversationOptions, ToolCall
from services.generation.finish import FinishReason
from services.generation.prompts import (
    ChatPrompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.retention import RetentionHint

ASKS = RetentionHint(next_prefix=True)
USER = ChatMessage(role="user", content="Rain?")
CALL = ToolCall(id="c", name="look", arguments="{}")
TOO_LONG = Rejection(code=RejectCode.CONTEXT_LENGTH, message="too long")


@dataclass
class FakeEngine:
    """Computes when the test says so."""

    rendered: list[ChatPrompt] = field(default_factory=list)
    asked: list[Submission] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    fault: Exception | None = None  # of rendering
    sink: DeltaSink | None = None
    idle: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # of rendering

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        assert isinstance(prompt, ChatPrompt)
        assert options.omits_generation_prompt
        self.rendered.append(prompt)
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return Tokenization(ids=(1, 2, 3), max_model_len=8)

    async def prepare(self, submissions: Sequence[Submission]) -> list[PreparedRequest]:
        self.asked += submissions
        return [PreparedRequest(engine_id="x", num_prompt_tokens=3)]

    async def add(self, prepared: PreparedRequest, sink: DeltaSink) -> None:
        self.sink = sink

    def abort(self, engine_ids: Sequence[str]) -> None:
        self.aborted += engine_ids


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.gate.set()
    return engine


@pytest.fixture
async def prefixes(engine: FakeEngine) -> AsyncIterator[NextPrefixes]:
    prefixes = NextPrefixes(lambda: engine.idle)
    yield prefixes
    prefixes.stop()
    engine.gate.set()
    await settle()
    assert not prefixes.engine_ids


def submission(**fields: Any) -> Submission:
    known = {"prompt": ChatPrompt((USER,)), "retention": ASKS, "cache_salt": "alice"}
    return Submission(request_id="r", generation=1, model="m", **{**known, **fields})


def end(
    prefixes: NextPrefixes,
    engine: FakeEngine,
    *,
    ending: FinishReason | Failure = FinishReason.STOP,
    calls: tuple[ToolCall, ...] = (),
    **fields: Any,
) -> None:
    asked = submission(**fields)
    answer = answer_of(asked)
    assert answer is not None
    answer.take([Token(1, "", reasoning="Hm."), Token(2, "No")])
    answer.take([Token(3, ".")])
    prefixes.ended(engine, asked, answer, Delta((), ending, tool_calls=calls))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def count(result: str) -> float:
    name = "evenflow_executor_next_prefixes_total"
    return REGISTRY.get_sample_value(name, {"result": result}) or 0.0


async def test_the_conversation_with_its_answer_is_computed_and_its_token_thrown_away(
    prefixes: NextPrefixes, engine: FakeEngine
) -> None:
    before = count("computed")
    end(prefixes, engine)
    await settle()

    (prompt,) = engine.rendered
    assert [(one.role, one.content) for one in prompt.messages] == [
        ("user", "Rain?"),
        ("assistant", "No."),
        ("user", "."),
    ]
    assert prompt.messages[1].reasoning == "Hm."
    assert prompt.options.omits_generation_prompt
    (asked,) = engine.asked
    assert asked.prompt == TokenPrompt((1, 2, 3))
    assert (asked.sampling.max_tokens, asked.priority) == (1, LOWEST_PRIORITY)
    assert (asked.model, asked.cache_salt, asked.retention) == ("m", "alice", None)
    assert prefixes.engine_ids == {"x"}

    assert engine.sink is not None
    engine.sink(Delta((Token(9, "!"),), FinishReason.LENGTH))
    await settle()
    assert (prefixes.engine_ids, engine.aborted) == (frozenset(), [])
    assert count("computed") == before + 1


async def test_behind_calls_come_their_results(prefixes: NextPrefixes, engine: FakeEngine) -> None:
    end(prefixes, engine, ending=FinishReason.TOOL_CALLS, calls=(CALL,))
    await settle()

    *_, answer, result = engine.rendered[0].messages
    assert answer.tool_calls == (CALL,)
    assert (result.role, result.tool_call_id) == ("tool", "c")


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": None},
        {"retention": RetentionHint()},
        {"prompt": TextPrompt("Rain?")},  # is cached with its answer
        {
            "prompt": ChatPrompt(
                (USER,),
                ConversationOptions(omits_generation_prompt=True, continues_final_message=True),
            )
        },
        {
            "resume": Resume(
                output_ids=(1,),
                max_tokens=0,
                num_delivered_tokens=0,
                last_due_age_s=0.0,
                arrived_age_s=0.0,
                num_cached_tokens=0,
                prompt_digest=0,
            )
        },
    ],
)
def test_of_other_requests_nothing_is_computed(fields: dict[str, Any]) -> None:
    assert answer_of(submission(**fields)) is None


@pytest.mark.parametrize("ending", [FinishReason.CANCELLED, Failure(message="", retryable=True)])
async def test_an_answer_that_did_not_end_by_itself_has_no_next_turn(
    prefixes: NextPrefixes, engine: FakeEngine, ending: FinishReason | Failure
) -> None:
    end(prefixes, engine, ending=ending)
    await settle()

    assert not engine.rendered


async def test_while_requests_wait_it_is_dropped(
    prefixes: NextPrefixes, engine: FakeEngine
) -> None:
    before, engine.idle = count("dropped"), False
    end(prefixes, engine)
    await settle()

    assert not engine.rendered
    assert count("dropped") == before + 1


async def test_one_is_computed_at_a_time(prefixes: NextPrefixes, engine: FakeEngine) -> None:
    before = count("dropped")
    end(prefixes, engine)
    end(prefixes, engine)
    await settle()

    assert len(engine.asked) == 1
    assert count("dropped") == before + 1


async def test_a_request_that_comes_ends_it(prefixes: NextPrefixes, engine: FakeEngine) -> None:
    before = count("dropped")
    end(prefixes, engine)
    await settle()
    prefixes.stop()
    await settle()

    assert (engine.aborted, prefixes.engine_ids) == (["x"], frozenset())
    assert count("dropped") == before + 1


@pytest.mark.parametrize("how", ["a request comes", "a request waits"])
async def test_a_request_that_comes_while_it_is_rendered_keeps_it_out_of_the_engine(
    prefixes: NextPrefixes, engine: FakeEngine, how: str
) -> None:
    engine.gate.clear()
    end(prefixes, engine)
    await settle()
    if how == "a request comes":
        prefixes.stop()
    engine.idle = how != "a request waits"
    engine.gate.set()
    await settle()

    assert engine.sink is None
    end(prefixes, engine)  # the next one may begin
    engine.idle = True
    await settle()
    assert engine.sink is not None


async def test_a_request_that_the_engine_has_lost_is_let_go_of(
    prefixes: NextPrefixes, engine: FakeEngine
) -> None:
    end(prefixes, engine)
    await settle()
    prefixes.lose(["y"])
    await settle()
    assert prefixes.engine_ids == {"x"}
    prefixes.lose(["x", "y"])
    await settle()
    assert not prefixes.engine_ids


@pytest.mark.parametrize("ending", [FinishReason.CANCELLED, Failure(message="", retryable=True)])
async def test_what_the_engine_ends_early_is_not_computed(
    prefixes: NextPrefixes, engine: FakeEngine, ending: FinishReason | Failure
) -> None:
    before = count("dropped")
    end(prefixes, engine)
    await settle()
    assert engine.sink is not None
    engine.sink(Delta((), ending))
    await settle()

    assert count("dropped") == before + 1


async def test_a_prompt_that_is_too_long_is_dropped(
    prefixes: NextPrefixes, engine: FakeEngine
) -> None:
    before, engine.fault = count("dropped"), RejectedError(TOO_LONG)
    end(prefixes, engine)
    await settle()

    assert not engine.asked
    assert count("dropped") == before + 1


@pytest.mark.logs("next_prefix_crashed")
async def test_a_bug_ends_one_and_no_more(prefixes: NextPrefixes, engine: FakeEngine) -> None:
    engine.fault = RuntimeError("a bug")
    end(prefixes, engine)
    await settle()
    engine.fault = None
    end(prefixes, engine)
    await settle()

    assert engine.sink is not None
