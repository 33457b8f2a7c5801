"""Sessions on an engine that generates when the test says so."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
from prometheus_client import REGISTRY

from evenflow.executor.v1 import executor_pb2 as pb
from services.executor.engine.collector import DeltaSink
from services.executor.kv_holders import HoldingRequest, HoldingSession, KVHolders, KVUse
from services.executor.observation import EngineObservation, RequestObservation
from services.executor.servicer import ExecutorServicer
from services.executor.serving.accounts import Accounts
from services.executor.serving.front import Front
from services.executor.serving.session import Session
from services.executor.serving.step_stream import Acceptance, Frame
from services.executor.serving.tool_waits import DEFAULT_WAIT_S
from services.executor.types import (
    Delta,
    EngineLoad,
    Failure,
    HeldRequests,
    Holder,
    ModelInfo,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Resume,
    Submission,
    Token,
)
from services.generation.conversation import ChatMessage, ToolCall
from services.generation.finish import FinishReason
from services.generation.lifecycle import RequestStatus
from services.generation.logprobs import EchoedPrompt, Logprob, TokenLogprobs
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.generation.retention import RetentionHint
from services.kit.errors import InvalidRequestError, NotFoundError, UnavailableError
from services.pacing.types import ServiceLevel
from services.placement.run.reason import Reason
from services.placement.types import RequestPhase
from services.reporting.load import ExecutorLoad


def make_observed_request(request_id: str) -> RequestObservation:
    return RequestObservation(
        request_id=request_id,
        phase=RequestPhase.DECODING,
        num_prompt_tokens=7,
        num_computed_tokens=7,
        num_generated_tokens=1,
        num_delivered_tokens=0,
        num_deposited_tokens=1,
        num_late_tokens=0,
        interval_s=0.0,
    )


UNWELCOME = "unwelcome"  # a request that the engine fails on
PROMPT_IDS = (5, 6, 7, 8, 9, 10, 11)
TAKEN = Acceptance(num_prompt_tokens=7, max_tokens=9)
SCORES = (TokenLogprobs(Logprob(0, "x", None)),)
TOO_LONG = Rejection(code=RejectCode.CONTEXT_LENGTH, field="prompt", message="too long")


@dataclass
class FakeEngine:
    """Keeps sinks by engine id; `render_gate` holds back the rendering of the text "slow"."""

    sinks: dict[str, DeltaSink] = field(default_factory=dict)
    render_gate: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: dict[str, int] = field(default_factory=dict)
    holds: list[tuple[str, bool]] = field(default_factory=list)
    paces: list[tuple[str, ServiceLevel]] = field(default_factory=list)
    num_prepared: int = 0
    fair_keys: list[str] = field(default_factory=list)  # of those that detokenised
    turns: list[tuple[str, int, bool]] = field(default_factory=list)
    kept_turns: list[tuple[str, float]] = field(default_factory=list)
    reads: bool = True  # answers, from their first tokens on
    steps: int = 0
    holders: KVHolders = field(default_factory=KVHolders)
    limits: list[int] = field(default_factory=list)  # of sessions, that were asked for

    async def kv_holders(self, max_sessions: int) -> KVHolders:
        self.limits.append(max_sessions)
        return self.holders

    async def prepare(self, submissions: Sequence[Submission]) -> list[PreparedRequest]:
        prompt = submissions[0].prompt
        match prompt.text if isinstance(prompt, TextPrompt) else "":
            case "slow":
                await self.render_gate.wait()
            case "long":
                raise RejectedError(TOO_LONG)
            case "crash":
                raise RuntimeError("a bug")
        self.num_prepared += 1
        return [
            PreparedRequest(
                engine_id=f"{one.request_id}-x",
                num_prompt_tokens=len(PROMPT_IDS),
                max_tokens=9,
                text="the prompt",
                prompt_ids=PROMPT_IDS if one.returns_prompt_ids else (),
                reads=self.reads,
                resume=one.resume,
                retold=retold_of(one.resume),
            )
            for one in submissions
        ]

    async def add(self, prepared: PreparedRequest, sink: DeltaSink) -> None:
        if prepared.engine_id == f"{UNWELCOME}-x":
            raise RuntimeError("a bug")
        self.sinks[prepared.engine_id] = sink

    def abort(self, engine_ids: Sequence[str]) -> None:
        for engine_id in engine_ids:
            if sink := self.sinks.pop(engine_id, None):
                sink(Delta((), FinishReason.CANCELLED))

    def generate(self, request_id: str, *ids: int, ending: FinishReason | None = None) -> None:
        self.sinks[f"{request_id}-x"](Delta(tuple(Token(id, "t") for id in ids), ending))
        if ending:
            del self.sinks[f"{request_id}-x"]

    def deliver(self, engine_id: str, num_delivered: int) -> None:
        self.delivered[engine_id] = num_delivered

    def turn(self, engine_id: str, index: int, *, reads: bool) -> None:
        self.turns.append((engine_id, index, reads))

    def repace(self, engine_id: str, service_level: ServiceLevel) -> None:
        self.paces.append((engine_id, service_level))

    def hold(self, engine_id: str, held: bool) -> None:
        self.holds.append((engine_id, held))

    def keep_turn(self, engine_id: str, seconds: float) -> None:
        self.kept_turns.append((engine_id, seconds))

    def num_steps(self) -> int:
        return self.steps

    async def held(self) -> HeldRequests:
        return HeldRequests(answered=frozenset(self.sinks), computed=frozenset(self.sinks))

    async def observe(self) -> EngineObservation:
        return EngineObservation(
            requests=tuple(make_observed_request(engine_id) for engine_id in (*self.sinks, "ended"))
        )

    def load(self) -> EngineLoad:
        return EngineLoad(num_running_reqs=len(self.sinks), output_tps=20.0)

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        if isinstance(prompt, ChatPrompt):
            return Tokenization(ids=PROMPT_IDS, max_model_len=8)
        if prompt.text == "long":
            raise RejectedError(TOO_LONG)
        return Tokenization(ids=tuple(map(ord, prompt.text)), max_model_len=8)

    async def detokenize(self, ids: Sequence[int], *, fair_key: str) -> str:
        self.fair_keys.append(fair_key)
        return "".join(map(chr, ids))

    def model_info(self, model_id: str) -> ModelInfo:
        sizes = {field.name: 1 for field in fields(ModelInfo) if field.type is int}
        return ModelInfo(model=model_id, dtype="float32", caches_prefixes=True, **sizes)


@dataclass
class RecordedProgress:
    notes: list[tuple[str, int, RequestStatus]] = field(default_factory=list)

    def note(
        self, request_id: str, *, generation: int, num_generated: int, status: RequestStatus
    ) -> None:
        self.notes.append((request_id, num_generated, status))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def progress() -> RecordedProgress:
    return RecordedProgress()


@pytest.fixture
def front(engine: FakeEngine, progress: RecordedProgress) -> Front:
    front = Front(model_id="m", max_num_reqs=3, progress=progress)
    front.serve(engine)
    return front


@pytest.fixture
async def session(front: Front) -> AsyncIterator[Session]:
    session = front.open_session("gateway-1")
    yield session
    front.close_session(session)


def make_submission(request_id: str = "r", text: str = "hi", **overrides: Any) -> Submission:
    fields = {"generation": 1, "model": "m", "prompt": TextPrompt(text=text)}
    return Submission(request_id=request_id, **{**fields, **overrides})


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def next_frame(session: Session) -> Frame:
    return await asyncio.wait_for(anext(aiter(session.frames())), timeout=60)


async def submit(session: Session, *texts: str) -> None:
    """Submit one request per text, named by its text."""
    for text in texts:
        session.submit([make_submission(text, text)])
    await settle()


async def test_a_request_is_accepted_before_its_first_token(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a")
    engine.generate("a", 1)
    frame = await next_frame(session)

    assert frame.accepted == {"a": TAKEN}
    assert frame.outputs["a"].tokens == [Token(1, "t")]


async def test_a_prompt_that_renders_slowly_holds_nobody_up(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "slow", "a")
    engine.generate("a", 1, ending=FinishReason.STOP)

    assert (await next_frame(session)).accepted == {"a": TAKEN}
    engine.render_gate.set()
    assert (await next_frame(session)).accepted == {"slow": TAKEN}


@pytest.mark.logs("request_rejected")
async def test_a_request_that_the_engine_refuses_leaves_no_trace(
    session: Session, front: Front
) -> None:
    await submit(session, "long")

    assert (await next_frame(session)).rejected == [("long", TOO_LONG)]
    assert front.num_live == 0


@pytest.mark.logs("gateway_connected", "request_start_crashed")
async def test_a_start_that_crashes_ends_only_its_own_request(
    session: Session, front: Front
) -> None:
    await submit(session, "crash", "a")
    frame = await next_frame(session)

    assert [(id, r.code) for id, r in frame.rejected] == [("crash", RejectCode.INTERNAL)]
    assert frame.accepted == {"a": TAKEN}
    assert front.num_live == 1


async def test_a_live_id_is_refused_and_its_request_goes_on(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a", "a")
    engine.generate("a", 1)
    frame = await next_frame(session)

    assert [(id, r.code) for id, r in frame.rejected] == [("a", RejectCode.DUPLICATE)]
    assert frame.outputs["a"].tokens == [Token(1, "t")]


async def test_an_id_may_return_after_its_ending_was_sent(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a")
    engine.generate("a", 1, ending=FinishReason.STOP)
    await submit(session, "a")  # the gateway cannot have seen the ending
    assert [r.code for _, r in (await next_frame(session)).rejected] == [RejectCode.DUPLICATE]

    await submit(session, "a")

    assert (await next_frame(session)).accepted == {"a": TAKEN}


async def test_two_gateways_may_use_the_same_id(front: Front) -> None:
    sessions = [front.open_session(f"gateway-{i}") for i in range(2)]
    for session in sessions:
        await submit(session, "slow")
        assert session.num_live == 1
        session.close()


async def test_an_unknown_model_and_a_full_queue_are_refused(session: Session) -> None:
    session.submit([make_submission("other", model="gpt")])
    await submit(session, "a", "b", "c", "d")
    frame = await next_frame(session)

    assert [(id, r.code, r.field) for id, r in frame.rejected] == [
        ("other", RejectCode.UNKNOWN_MODEL, "model"),
        ("d", RejectCode.OVERLOADED, ""),
    ]


async def test_requests_name_the_model_or_an_adapter_of_it(engine: FakeEngine) -> None:
    front = Front(model_id="m", adapter_ids=["tuned"], max_num_reqs=3)
    front.serve(engine)
    session = front.open_session("gateway-1")
    for model in ("m", "tuned", "other"):
        session.submit([make_submission(model, model=model)])
    await settle()
    frame = await next_frame(session)
    front.close_session(session)

    assert (list(frame.accepted), [id for id, _ in frame.rejected]) == (["m", "tuned"], ["other"])
    assert await front.detokenize("tuned", [97], fair_key="") == "a"
    with pytest.raises(NotFoundError):
        await front.detokenize("other", [97], fair_key="")


@pytest.mark.logs("gateway_left")
async def test_abort_ends_a_request_as_cancelled(session: Session, engine: FakeEngine) -> None:
    await submit(session, "a")
    engine.generate("a", 1)
    session.abort("a")
    session.abort("a")
    session.abort("never-seen")

    output = (await next_frame(session)).outputs["a"]
    assert output.ending is FinishReason.CANCELLED
    assert output.tokens == [Token(1, "t")]
    assert not engine.sinks


async def test_abort_while_the_prompt_renders_never_reaches_the_engine(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "slow")
    session.abort("slow")
    frame = await next_frame(session)

    assert frame.accepted == {"slow": Acceptance(0)}
    assert frame.outputs["slow"].ending is FinishReason.CANCELLED
    assert session.num_live == 0
    engine.render_gate.set()
    await settle()
    assert not engine.sinks
    assert engine.num_prepared == 0


async def test_requests_that_are_aborted_in_their_first_moment_cost_nothing(
    session: Session, engine: FakeEngine
) -> None:
    for number in range(3):
        session.submit([make_submission(f"r{number}")])
        session.abort(f"r{number}")
        session.abort(f"r{number}")
    frame = await next_frame(session)
    await settle()

    assert [output.ending for output in frame.outputs.values()] == [FinishReason.CANCELLED] * 3
    assert engine.num_prepared == 0


def submissions(text: str, *request_ids: str) -> list[Submission]:
    return [make_submission(request_id, text) for request_id in request_ids]


async def test_answers_to_one_prompt_are_prepared_once_and_end_each_by_itself(
    session: Session, engine: FakeEngine
) -> None:
    session.submit(submissions("hi", "a", "b"))
    await settle()
    engine.generate("b", 1, ending=FinishReason.STOP)
    engine.generate("a", 2)
    frame = await next_frame(session)

    assert engine.num_prepared == 1
    assert frame.accepted == {"a": TAKEN, "b": TAKEN}
    assert frame.outputs["a"].ending is None
    assert frame.outputs["b"].ending is FinishReason.STOP


@pytest.mark.parametrize(
    ("text", "request_ids", "code"),
    [
        ("long", "ab", RejectCode.CONTEXT_LENGTH),
        ("crash", "ab", RejectCode.INTERNAL),
        ("hi", "abcd", RejectCode.OVERLOADED),  # there is room for three
        ("hi", "aba", RejectCode.DUPLICATE),
    ],
)
async def test_all_answers_to_a_prompt_are_refused_together(
    session: Session, front: Front, text: str, request_ids: str, code: RejectCode
) -> None:
    session.submit(submissions(text, *request_ids))
    await settle()
    frame = await next_frame(session)

    assert [(id, r.code) for id, r in frame.rejected] == [(id, code) for id in request_ids]
    assert front.num_live == 0


async def test_an_answer_that_is_aborted_early_leaves_the_prompt_to_the_others(
    session: Session, engine: FakeEngine
) -> None:
    session.submit(submissions("slow", "a", "b"))
    await settle()
    session.abort("a")
    engine.render_gate.set()
    await settle()
    frame = await next_frame(session)

    assert frame.accepted == {"a": Acceptance(0), "b": TAKEN}
    assert frame.outputs["a"].ending is FinishReason.CANCELLED
    assert list(engine.sinks) == ["b-x"]


async def test_a_prompt_is_not_prepared_once_all_its_answers_are_aborted(
    session: Session, engine: FakeEngine
) -> None:
    session.submit(submissions("slow", "a", "b"))
    await settle()
    for request_id in "ab":
        session.abort(request_id)
    engine.render_gate.set()
    await settle()

    assert engine.num_prepared == 0
    assert session.num_live == 0


async def test_an_answer_that_crashes_on_its_way_into_the_engine_takes_the_others_with_it(
    session: Session, front: Front, engine: FakeEngine
) -> None:
    session.submit(submissions("hi", "a", UNWELCOME, "c"))
    await settle()
    frame = await next_frame(session)

    assert isinstance(frame.outputs["a"].ending, Failure)
    assert isinstance(frame.outputs[UNWELCOME].ending, Failure)
    assert [(id, r.code) for id, r in frame.rejected] == [("c", RejectCode.INTERNAL)]
    assert not engine.sinks
    assert front.num_live == 0


async def test_a_closed_session_leaves_nothing_behind(
    front: Front, engine: FakeEngine, progress: RecordedProgress
) -> None:
    session = front.open_session("gateway-1")
    await submit(session, "a", "slow")
    front.close_session(session)
    engine.render_gate.set()
    await settle()

    assert not engine.sinks
    assert front.num_live == 0
    assert progress.notes[-1] == ("a", 0, RequestStatus.CANCELLED)


async def test_progress_follows_a_request(
    session: Session, engine: FakeEngine, progress: RecordedProgress
) -> None:
    await submit(session, "a")
    engine.generate("a", 1)
    engine.generate("a", 2, ending=FinishReason.LENGTH)

    assert progress.notes == [
        ("a", 0, RequestStatus.QUEUED),
        ("a", 1, RequestStatus.DECODING),
        ("a", 2, RequestStatus.FINISHED),
    ]


async def test_an_answer_that_ends_with_calls_is_kept_and_its_tools_time_is_measured(
    session: Session, engine: FakeEngine
) -> None:
    call = ToolCall(id="c0", name="look-up", arguments="{}")
    turns = (ChatMessage(role="user", content="Rain?"),)
    session.submit([make_submission("a", prompt=ChatPrompt(turns))])
    await settle()
    engine.sinks["a-x"](Delta((Token(1, "t"),), FinishReason.TOOL_CALLS, tool_calls=(call,)))

    assert engine.kept_turns == [("a-x", DEFAULT_WAIT_S)]
    assert num_waits("look-up") == 0

    turns += (
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="No.", tool_call_id="c0"),
    )
    session.submit([make_submission("b", prompt=ChatPrompt(turns))])
    await settle()
    engine.generate("b", 1, ending=FinishReason.STOP)

    assert num_waits("look-up") == 1
    assert len(engine.kept_turns) == 1


async def test_a_next_prefix_is_computed_once_nothing_waits_and_is_no_request_of_a_gateway(
    session: Session, front: Front, engine: FakeEngine, progress: RecordedProgress
) -> None:
    prompt = ChatPrompt((ChatMessage(role="user", content="Rain?"),))
    hint = RetentionHint(next_prefix=True)
    session.submit([make_submission("a", prompt=prompt, retention=hint)])
    await settle()
    engine.generate("a", 1, 2, ending=FinishReason.STOP)
    notes = len(progress.notes)
    await settle()

    assert set(engine.sinks) == front.held() == {"next-a-x"}
    assert (front.num_live, front.num_deposited) == (0, 0)
    assert front.load_for_gateways().num_newcomers == 0
    assert len(progress.notes) == notes

    await submit(session, "b")  # whatever comes is more urgent
    await settle()
    assert set(engine.sinks) == {"b-x"}

    session.submit([make_submission("c", prompt=prompt, retention=hint)])
    await settle()
    engine.generate("c", 1, ending=FinishReason.STOP)
    await settle()
    assert set(engine.sinks) == {"b-x"}  # which waits for its first token
    assert front.held() == {"b-x"}


async def test_what_a_next_prefix_needs_is_let_go_of_with_the_engine(
    session: Session, front: Front, engine: FakeEngine
) -> None:
    prompt = ChatPrompt((ChatMessage(role="user", content="Rain?"),))
    hint = RetentionHint(next_prefix=True)
    session.submit([make_submission("a", prompt=prompt, retention=hint)])
    await settle()
    engine.generate("a", 1, ending=FinishReason.STOP)
    await settle()
    front.lose(["next-a-x"])
    await settle()

    assert not front.held()


def num_waits(tool: str) -> float:
    name = "evenflow_executor_tool_wait_seconds_count"
    return REGISTRY.get_sample_value(name, {"tool": tool}) or 0.0


async def test_the_deposit_is_what_was_generated_and_not_delivered(
    session: Session, front: Front, engine: FakeEngine
) -> None:
    await submit(session, "a", "b")
    engine.generate("a", 1, 2, 3)
    engine.generate("b", 4, 5)
    session.take_delivered([("a", 2), ("never-seen", 9)])
    session.take_delivered([("a", 1)])  # late: counts never fall

    assert front.num_deposited == (3 - 2) + (2 - 0)

    engine.generate("b", 6, ending=FinishReason.STOP)
    assert front.num_deposited == 1


async def test_a_gateway_that_sends_no_more_still_gets_its_answers(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a")
    session.end_input()
    engine.generate("a", 1, ending=FinishReason.STOP)

    frames = [frame async for frame in session.frames()]

    assert frames[-1].outputs["a"].ending is FinishReason.STOP


async def test_requests_that_the_engine_has_lost_end_and_give_their_places_back(
    front: Front, engine: FakeEngine, progress: RecordedProgress
) -> None:
    gone, here = front.open_session("gateway-1"), front.open_session("gateway-2")
    await submit(gone, "a", "slow")  # the engine does not know the second one yet
    await submit(here, "b")
    del engine.sinks["a-x"]
    draining = await drain_in_background(front, timeout_s=60)
    accounts = Accounts(front, engine)
    await accounts.look()
    await accounts.look()

    ending = (await next_frame(gone)).outputs["a"].ending
    assert isinstance(ending, Failure)
    assert ending.retryable
    assert progress.notes[-1] == ("a", 0, RequestStatus.FAILED)
    assert (gone.num_live, here.num_live) == (1, 1)
    gone.abort("slow")
    engine.generate("b", 1, ending=FinishReason.STOP)
    await asyncio.wait_for(draining, timeout=60)


async def test_requests_that_no_session_has_end_in_the_engine(
    front: Front, engine: FakeEngine
) -> None:
    session = front.open_session("gateway-1")
    await submit(session, "a")
    engine.sinks["stray"] = lambda delta: None
    accounts = Accounts(front, engine)
    await accounts.look()
    await accounts.look()

    assert engine.sinks.keys() == {"a-x"}
    front.close_session(session)


async def drain_in_background(front: Front, timeout_s: float) -> "asyncio.Task[None]":
    task = asyncio.create_task(front.drain(timeout_s))
    await settle()
    return task


async def test_drain_lets_live_requests_end_and_takes_no_new_ones(
    session: Session, front: Front, engine: FakeEngine
) -> None:
    await submit(session, "a")
    draining = await drain_in_background(front, timeout_s=60)
    await submit(session, "late")
    assert not draining.done()
    with pytest.raises(UnavailableError):
        front.open_session("gateway-2")

    engine.generate("a", 1, ending=FinishReason.STOP)
    await asyncio.wait_for(draining, timeout=60)

    frame = await next_frame(session)
    assert frame.outputs["a"].ending is FinishReason.STOP
    assert [(id, r.code) for id, r in frame.rejected] == [("late", RejectCode.UNAVAILABLE)]
    with pytest.raises(UnavailableError):
        await next_frame(session)


def make_resume(*output_ids: int, **overrides: Any) -> Resume:
    fields: dict[str, Any] = {
        "output_ids": output_ids,
        "max_tokens": 9,
        "num_delivered_tokens": 1,
        "last_due_age_s": 0.0,
        "arrived_age_s": 2.0,
        "num_cached_tokens": 0,
        "prompt_digest": 0,
    }
    return Resume(**fields | overrides)


async def test_an_answer_goes_on_behind_its_tokens_and_its_prompt_is_not_given_back_again(
    front: Front, session: Session, engine: FakeEngine, progress: RecordedProgress
) -> None:
    session.submit([make_submission("a", echo=True, resume=make_resume(5, 6, 7))])
    await settle()
    assert front.num_deposited == 2
    engine.generate("a", 8)
    output = (await next_frame(session)).outputs["a"]

    assert output.first_token_index == 3
    assert output.prompt is None
    assert progress.notes[-1] == ("a", 4, RequestStatus.DECODING)


def retold_of(resume: Resume | None) -> tuple[Token, ...]:
    """Return the tokens that are told again: thoughts."""
    num_retold = 0 if resume is None else resume.num_retold_tokens
    ids = resume.output_ids[-num_retold:] if resume is not None and num_retold else ()
    return tuple(Token(id, "", reasoning="t", is_read=False) for id in ids)


async def test_tokens_are_told_again_to_a_gateway_that_has_their_ids_alone(
    front: Front, session: Session, engine: FakeEngine, progress: RecordedProgress
) -> None:
    resume = make_resume(5, 6, 7, num_retold_tokens=3)
    session.submit([make_submission("a", returns_prompt_ids=True, resume=resume)])
    await settle()
    told = (await next_frame(session)).outputs["a"]
    assert front.num_deposited == 2
    engine.generate("a", 8)
    output = (await next_frame(session)).outputs["a"]

    assert (told.first_token_index, [token.id for token in told.tokens]) == (0, [5, 6, 7])
    assert told.prompt is not None
    assert (output.first_token_index, [token.id for token in output.tokens]) == (3, [8])
    assert engine.turns == []  # the engine knows how the tokens that it has are read
    assert progress.notes[-1] == ("a", 4, RequestStatus.DECODING)


async def test_there_is_a_quarter_more_room_for_answers_that_were_begun_elsewhere(
    engine: FakeEngine,
) -> None:
    front = Front(model_id="m", max_num_reqs=4)
    front.serve(engine)
    session = front.open_session("gateway-1")
    await submit(session, "a", "b", "c", "d", "new")
    session.submit([make_submission("a client's", resume=make_resume(5, num_retold_tokens=1))])
    for name in ("moved", "one too many"):
        session.submit([make_submission(name, resume=make_resume(5))])
    await settle()
    frame = await next_frame(session)
    front.close_session(session)

    assert list(frame.accepted) == ["a", "b", "c", "d", "moved"]
    assert [(id, r.code) for id, r in frame.rejected] == [
        ("new", RejectCode.OVERLOADED),
        ("a client's", RejectCode.OVERLOADED),
        ("one too many", RejectCode.OVERLOADED),
    ]


async def test_a_newer_stream_of_a_gateway_ends_those_before_it(
    front: Front, engine: FakeEngine
) -> None:
    older, other = front.open_session("g", epoch=4), front.open_session("h", epoch=1)
    unnumbered = front.open_session("g")
    for session, name in ((older, "a"), (other, "b"), (unnumbered, "c")):
        await submit(session, name)
        await next_frame(session)

    newer = front.open_session("g", epoch=5)

    assert engine.sinks.keys() == {"b-x", "c-x"}
    assert [frame async for frame in older.frames()] == []
    assert (older.num_live, newer.num_live) == (0, 0)
    with pytest.raises(UnavailableError):
        front.open_session("g", epoch=4)
    front.close_session(older)  # once more, as its call ends
    for session in (other, unnumbered, newer):
        front.close_session(session)


async def test_gateways_with_requests_hear_how_far_the_engine_is(
    front: Front, session: Session, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.executor.serving.front.BEAT_S", 0.0)
    idle = front.open_session("gateway-2")
    await submit(session, "slow")
    engine.steps = 7
    beats = asyncio.create_task(front.beat())

    frames = [await next_frame(session) for _ in range(2)]

    assert [(frame.has_news, frame.num_engine_steps) for frame in frames] == [(False, 7)] * 2
    assert (await next_frame(idle)).load == ExecutorLoad()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiter(idle.frames())), timeout=0.01)
    beats.cancel()
    front.close_session(idle)


async def test_gateways_hear_the_load_of_all_of_them_once_each_time_it_changes(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("services.kit.clock.monotonic_s", lambda: now_s)
    front = Front(model_id="m", max_num_reqs=8)
    front.serve(engine)
    busy, idle = front.open_session("g"), front.open_session("h")
    paced = ServiceLevel(consumption_rate_tps=5.0)
    busy.submit([make_submission("a", service_level=paced)])
    busy.submit([make_submission("b"), make_submission("c")])
    await settle()

    async def told() -> ExecutorLoad | None:
        idle.beat(front.load_for_gateways())
        return (await next_frame(idle)).load

    came = await told()
    now_s += 2.0
    engine.generate("a", 1, 2, 3)  # 7 prompt tokens in 2 s
    engine.generate("b", 1)  # 7 more
    busy.abort("c")
    busy.take_delivered([("a", 1)])
    served = await told()
    idle.beat(front.load_for_gateways())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiter(idle.frames())), timeout=0.01)
    busy.end_input()
    for session in (busy, idle):
        front.close_session(session)

    # Who reads 5 tokens of 20 a second takes a quarter; two of these tokens are in hand in the end.
    assert came == ExecutorLoad(
        num_running_reqs=3, num_newcomers=3, num_newcomer_tokens=21, reading_load_frac=0.25
    )
    assert served == ExecutorLoad(
        num_running_reqs=2, prefill_tps=7.0, deposit_s=0.4, reading_load_frac=0.25
    )
    assert front.load_for_gateways() == ExecutorLoad(prefill_tps=7.0)


async def test_parked_requests_whose_readers_have_tokens_are_no_newcomers(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(model_id="m", max_num_reqs=9)
    front.serve(engine)
    session = front.open_session("g")
    names = [f"reader-{number}" for number in range(8)]
    for name in names:
        session.submit([make_submission(name)])
    await settle()
    for name in names:
        engine.generate(name, 1)
    monkeypatch.setattr(engine, "load", lambda: EngineLoad(num_waiting_reqs=8))  # in vLLM's queue
    parked = front.load_for_gateways()
    session.submit([make_submission("newcomer")])
    await settle()
    joined = front.load_for_gateways()
    session.end_input()
    front.close_session(session)

    assert (parked.num_newcomers, parked.num_newcomer_tokens, parked.num_running_reqs) == (0, 0, 0)
    assert joined.num_newcomers == 1


async def test_who_drains_tells_every_gateway(front: Front, session: Session) -> None:
    idle = front.open_session("gateway-2")
    await submit(session, "slow")
    draining = await drain_in_background(front, timeout_s=60)

    assert (await next_frame(session)).is_leaving
    assert (await next_frame(idle)).is_leaving
    session.abort("slow")
    await asyncio.wait_for(draining, timeout=60)


@pytest.mark.logs("drain_timed_out")
async def test_what_does_not_end_in_time_fails_and_may_be_retried(
    session: Session, front: Front, engine: FakeEngine
) -> None:
    await submit(session, "a", "slow")
    await front.drain(timeout_s=0)
    frame = await next_frame(session)

    ending = frame.outputs["a"].ending
    assert isinstance(ending, Failure)
    assert ending.retryable
    assert [(id, r.code) for id, r in frame.rejected] == [("slow", RejectCode.UNAVAILABLE)]
    assert not engine.sinks


@pytest.mark.parametrize("use", [Front.load, lambda front: front.open_session("gateway-1")])
async def test_nothing_is_served_before_the_engine_is_loaded_and_after_it_died(
    use: Callable[[Front], object], engine: FakeEngine
) -> None:
    front = Front(model_id="m", max_num_reqs=1)
    with pytest.raises(UnavailableError):
        use(front)
    front.serve(engine)
    use(front)
    front.die()
    with pytest.raises(UnavailableError):
        use(front)


async def test_delivered_counts_go_on_to_the_engine_under_its_own_ids(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a", "b", "slow")
    engine.generate("a", 1, 2, 3)

    session.take_delivered([("a", 2), ("slow", 1), ("gone", 5)])
    session.take_delivered([("a", 1)])  # overtaken

    assert engine.delivered == {"a-x": 2}


async def test_a_watcher_sees_requests_by_the_ids_of_their_gateways(
    front: Front, session: Session
) -> None:
    await submit(session, "a", "b", "slow")

    observation = await anext(front.observations(0.0))

    assert [request.request_id for request in observation.requests] == ["a", "b"]


async def test_a_watch_ends_when_the_front_has_drained(front: Front, session: Session) -> None:
    updates = front.observations(0.0)
    await anext(updates)
    await front.drain(timeout_s=1.0)

    assert [update async for update in updates] == []


async def test_an_engine_that_loads_cannot_be_watched() -> None:
    with pytest.raises(UnavailableError):
        await anext(Front(model_id="m", max_num_reqs=1).observations(0.0))


async def test_a_prompt_goes_back_with_the_first_token_and_never_again(
    engine: FakeEngine, session: Session
) -> None:
    session.submit([make_submission(echo=True)])
    await settle()
    engine.sinks["r-x"](Delta((Token(1, "a"),), None, SCORES))
    first = await next_frame(session)
    # A prompt that is computed again is scored again.
    engine.sinks["r-x"](Delta((Token(2, "b"),), None, SCORES))
    second = await next_frame(session)

    assert first.outputs["r"].prompt == EchoedPrompt("the prompt", SCORES)
    assert second.outputs["r"].prompt is None


async def test_a_prompt_s_ids_go_back_without_its_text(
    engine: FakeEngine, session: Session
) -> None:
    session.submit([make_submission(returns_prompt_ids=True)])
    await settle()
    engine.generate("r", 1)
    first = await next_frame(session)
    engine.generate("r", 2)
    second = await next_frame(session)

    assert first.outputs["r"].prompt == EchoedPrompt("", token_ids=PROMPT_IDS)
    assert second.outputs["r"].prompt is None


async def test_a_prompt_goes_back_although_the_writer_lags(
    engine: FakeEngine, session: Session
) -> None:
    session.submit([make_submission(echo=True)])
    await settle()
    engine.generate("r", 1)
    engine.generate("r", 2)

    output = (await next_frame(session)).outputs["r"]

    assert output.prompt == EchoedPrompt("the prompt")
    assert len(output.tokens) == 2


async def test_a_prompt_that_nobody_asked_for_stays(engine: FakeEngine, session: Session) -> None:
    session.submit([make_submission()])
    await settle()
    engine.generate("r", 1)

    assert (await next_frame(session)).outputs["r"].prompt is None


async def test_a_front_tokenises_for_its_model_alone(front: Front) -> None:
    prompt, options = TextPrompt(text="hi"), TokenizeOptions()

    assert (await front.tokenize("m", prompt, options)).ids == (104, 105)
    assert await front.detokenize("m", [104], fair_key="") == "h"
    with pytest.raises(NotFoundError):
        await front.tokenize("other", prompt, options)
    with pytest.raises(NotFoundError):
        await front.detokenize("other", [1], fair_key="")


async def test_tokens_become_text_in_the_turn_of_their_client(
    front: Front, engine: FakeEngine
) -> None:
    servicer = ExecutorServicer(front, executor_id="e", epoch=1)
    request = pb.DetokenizeRequest(model="m", ids=[104], fair_key="alice")

    assert (await servicer.Detokenize(request, None)).text == "h"
    assert engine.fair_keys == ["alice"]


async def test_what_the_engine_cannot_tokenise_names_its_field(front: Front) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await front.tokenize("m", TextPrompt(text="long"), TokenizeOptions())

    assert caught.value.field == "prompt"


async def test_a_front_without_an_engine_tokenises_nothing() -> None:
    with pytest.raises(UnavailableError):
        await Front(model_id="m", max_num_reqs=1).detokenize("m", [1], fair_key="")


async def test_a_hold_reaches_the_engine_under_its_own_id(
    session: Session, engine: FakeEngine
) -> None:
    await submit(session, "a", "slow")  # the engine has yet to hear of the second
    session.hold([("a", True), ("slow", True), ("never here", True)])
    session.hold([("a", False)])

    assert engine.holds == [("a-x", True), ("a-x", False)]


async def test_a_new_pace_reaches_the_engine_under_its_own_id(
    session: Session, engine: FakeEngine
) -> None:
    level = ServiceLevel(consumption_rate_tps=4.0)
    await submit(session, "a", "slow")  # the engine has yet to hear of the second
    session.repace([("a", level), ("slow", level), ("never here", level)])

    assert engine.paces == [("a-x", level)]


@pytest.mark.parametrize(
    ("reads", "turns"),
    [(True, [("a-x", 0, False), ("a-x", 3, True)]), (False, [("a-x", 3, True)])],
)
async def test_the_scheduler_hears_where_thoughts_end_and_text_begins(
    session: Session, engine: FakeEngine, reads: bool, turns: list[tuple[str, int, bool]]
) -> None:
    engine.reads = reads
    await submit(session, "a")
    thought, text = Token(1, "", is_read=False), Token(2, "t")
    for step in ((thought, thought), (thought,), (text, text), (text,)):
        engine.sinks["a-x"](Delta(step))

    assert engine.turns == turns


async def test_the_account_of_kv_has_the_names_that_gateways_gave(
    front: Front, engine: FakeEngine, session: Session
) -> None:
    holder = Holder(account="alice", session_id="s", request_class="agent")
    session.submit([make_submission("a", holder=holder)])
    await settle()
    holding = HoldingRequest(
        request_id="a-x",
        phase=RequestPhase.PREEMPTED,
        priority=3,
        why=Reason.NO_ROOM,
        waited_s=2.5,
        num_recomputed_tokens=4,
        use=KVUse(num_pool_tokens=1, num_host_tokens=2, num_shared_tokens=3),
    )
    kept = HoldingSession(account="alice", session_id="t", num_retained_tokens=64)
    engine.holders = KVHolders(requests=(holding,), sessions=(kept,), num_sessions=7)
    servicer: Any = ExecutorServicer(front, executor_id="e", epoch=1)

    told = await servicer.GetKVHolders(pb.GetKVHoldersRequest(), None)

    (request,), (share,), (sess,) = told.requests, told.shares, told.sessions
    assert request == pb.HoldingRequest(
        request_id="a",
        holder=pb.Holder(account="alice", session_id="s", request_class="agent"),
        state=pb.REQUEST_STATE_PARKED,
        priority=3,
        why="no_room",
        why_text="there is no room for it yet",
        waited_s=2.5,
        num_pool_tokens=1,
        num_host_tokens=2,
        num_shared_tokens=3,
        num_recomputed_tokens=4,
    )
    assert (share.num_requests, share.num_waiting, share.num_shared_tokens) == (1, 1, 3)
    assert sess == pb.HoldingSession(account="alice", session_id="t", num_retained_tokens=64)
    assert (told.num_requests, told.num_sessions) == (1, 7)
    assert engine.limits == [100]
    for limit in (-1, 1_001):
        with pytest.raises(InvalidRequestError):
            await servicer.GetKVHolders(pb.GetKVHoldersRequest(limit=limit), None)


async def test_a_changed_pace_sends_what_was_covered(session: Session, engine: FakeEngine) -> None:
    session.submit([make_submission("a", service_level=ServiceLevel(consumption_rate_tps=5.0))])
    await settle()
    engine.generate("a", *range(20))
    assert len((await next_frame(session)).outputs["a"].tokens) == 20
    engine.generate("a", 1)
    waiting = asyncio.ensure_future(next_frame(session))
    await settle()
    assert not waiting.done()

    session.repace([("a", ServiceLevel(consumption_rate_tps=50.0))])

    assert len((await waiting).outputs["a"].tokens) == 1
    engine.generate("a", 2)
    assert len((await next_frame(session)).outputs["a"].tokens) == 1


async def test_delivered_tokens_cover_none_that_come(session: Session, engine: FakeEngine) -> None:
    session.submit([make_submission("a", service_level=ServiceLevel(consumption_rate_tps=5.0))])
    await settle()
    engine.generate("a", *range(20))
    await next_frame(session)

    session.take_delivered([("a", 20)])
    engine.generate("a", 1)

    assert len((await next_frame(session)).outputs["a"].tokens) == 1
