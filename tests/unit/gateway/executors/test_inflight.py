"""How frames reach requests: each token once, in order, or a failure."""

from collections.abc import Sequence

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.errors import DuplicateRequestError, EngineFailedError, LinkBrokenError
from services.gateway.executors.inflight import InflightRequests
from services.gateway.types import Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt
from services.kit.errors import OverloadedError, ServiceError

STOPPED = pb.Ending(finish_reason=gen.FINISH_REASON_STOP)
STOPPED_THINKING = pb.Ending(finish_reason=gen.FINISH_REASON_STOP, num_reasoning_tokens=2)
CANCELLED = pb.Ending(finish_reason=gen.FINISH_REASON_CANCELLED)


class Sink:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.num_prompt_tokens: int | None = None
        self.tokens: list[Token] = []
        self.prompts: list[EchoedPrompt] = []
        self.arrived_s: list[float] = []
        self.endings: list[FinishReason | type[ServiceError]] = []
        self.num_reasoning_tokens: int | None = None

    def accepted(self, num_prompt_tokens: int, max_tokens: int = 0, prompt_digest: int = 0) -> None:
        self.num_prompt_tokens = num_prompt_tokens

    def rejected(self, error: ServiceError) -> None:
        self.endings.append(type(error))

    def echoed(self, prompt: EchoedPrompt) -> None:
        self.prompts.append(prompt)

    def extended(self, tokens: Sequence[Token], generated_s: float) -> None:
        self.tokens += tokens
        self.arrived_s += [generated_s] * len(tokens)

    def ended(
        self,
        reason: FinishReason,
        num_reasoning_tokens: int | None = None,
        num_cached_tokens: int = 0,
        stop_string: str = "",
    ) -> None:
        self.endings.append(reason)
        self.num_reasoning_tokens = num_reasoning_tokens

    def failed(self, error: ServiceError) -> None:
        self.endings.append(type(error))

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Executor:
    """Numbers frames as an executor does."""

    def __init__(self, requests: InflightRequests) -> None:
        self._requests = requests
        self._sequence = 0

    def send(self, *outputs: pb.RequestOutput, accepted: str = "", at_s: float = 0.0) -> list[str]:
        frame = pb.StreamResponse(
            sequence=self._sequence,
            accepted=[pb.Accepted(request_id=accepted, num_prompt_tokens=3)] if accepted else [],
            outputs=outputs,
        )
        self._sequence += 1
        return self._requests.apply(frame, at_s)


def make_output(
    first: int, text: str, ending: pb.Ending | None = None, *, request_id: str = "a"
) -> pb.RequestOutput:
    """Return an output of one token per character."""
    return pb.RequestOutput(
        request_id=request_id,
        first_token_index=first,
        tokens=[pb.Token(id=ord(character), text=character) for character in text],
        ending=ending,
    )


@pytest.fixture
def requests() -> InflightRequests:
    return InflightRequests()


@pytest.fixture
def executor(requests: InflightRequests) -> Executor:
    return Executor(requests)


@pytest.fixture
def sink(requests: InflightRequests, executor: Executor) -> Sink:
    """Hears request "a", which the executor has accepted."""
    sink = Sink()
    requests.add({"a": sink})
    executor.send(accepted="a")
    return sink


def test_a_request_hears_its_life(requests, executor, sink) -> None:
    executor.send(make_output(0, "xy"), at_s=1.0)
    executor.send(make_output(2, "z", STOPPED_THINKING), at_s=2.0)

    assert sink.num_prompt_tokens == 3
    assert sink.tokens == [
        Token(0, ord("x"), "x"),
        Token(1, ord("y"), "y"),
        Token(2, ord("z"), "z"),
    ]
    assert sink.arrived_s == [1.0, 1.0, 2.0]
    assert sink.endings == [FinishReason.STOP]
    assert sink.num_reasoning_tokens == 2
    assert len(requests) == 0


@pytest.mark.parametrize(
    ("first", "text", "expected"),
    [
        pytest.param(0, "abc", "abc", id="all-known"),
        pytest.param(0, "abcd", "abcd", id="one-more"),
        pytest.param(2, "cd", "abcd", id="overlap-of-one"),
        pytest.param(3, "d", "abcd", id="just-the-next"),
        pytest.param(1, "", "abc", id="nothing"),
    ],
)
def test_tokens_that_came_before_are_dropped(executor, sink, first, text, expected) -> None:
    executor.send(make_output(0, "abc"))

    assert executor.send(make_output(first, text)) == []

    assert sink.text == expected
    assert [token.index for token in sink.tokens] == list(range(len(expected)))
    assert sink.endings == []


def test_a_gap_fails_the_request_and_has_it_aborted_once(requests, executor, sink) -> None:
    executor.send(make_output(0, "abc"))

    assert executor.send(make_output(4, "e")) == ["a"]
    assert executor.send(make_output(5, "f")) == []

    assert sink.text == "abc"
    assert sink.endings == [LinkBrokenError]
    assert "a" in requests  # until the executor has ended it
    executor.send(make_output(6, "", CANCELLED))
    assert "a" not in requests
    assert sink.endings == [LinkBrokenError]


def test_a_gap_in_the_last_entry_needs_no_abort(requests, executor, sink) -> None:
    assert executor.send(make_output(1, "", STOPPED)) == []

    assert sink.endings == [LinkBrokenError]
    assert len(requests) == 0


def test_a_gap_of_one_request_leaves_others_alone(requests, executor, sink) -> None:
    other = Sink()
    requests.add({"b": other})
    executor.send(accepted="b")

    executor.send(make_output(3, "x"), make_output(0, "ok", STOPPED, request_id="b"))

    assert (other.text, other.endings) == ("ok", [FinishReason.STOP])


def test_a_missing_frame_breaks_the_link(requests, sink) -> None:
    frame = pb.StreamResponse(sequence=2, outputs=[make_output(0, "x")])

    with pytest.raises(LinkBrokenError):
        requests.apply(frame, 0.0)

    assert sink.tokens == []


def test_a_repeated_frame_is_ignored(requests, executor, sink) -> None:
    executor.send(make_output(0, "x"))

    requests.apply(pb.StreamResponse(sequence=1, outputs=[make_output(9, "?")]), 0.0)

    assert (sink.text, sink.endings) == ("x", [])


def test_a_refusal_is_told_and_forgotten(requests, executor) -> None:
    sink = Sink()
    requests.add({"a": sink})
    rejected = pb.Rejected(request_id="a", code=pb.REJECT_CODE_OVERLOADED)

    requests.apply(pb.StreamResponse(sequence=0, rejected=[rejected]), 0.0)

    assert sink.endings == [OverloadedError]
    assert len(requests) == 0


def test_a_failure_is_told(executor, sink) -> None:
    failure = pb.Failure(retryable=True, message="out of luck")
    executor.send(make_output(0, "x", pb.Ending(failure=failure)))

    assert (sink.text, sink.endings) == ("x", [EngineFailedError])


def test_an_id_in_hand_is_taken_until_the_executor_ends_it(requests, executor, sink) -> None:
    assert requests.abandon("a")
    with pytest.raises(DuplicateRequestError):
        requests.add({"a": Sink()})

    executor.send(make_output(0, "late", CANCELLED))
    again = Sink()
    requests.add({"a": again})

    assert sink.tokens == []
    assert again.tokens == []


def test_an_abort_is_told_to_the_executor_once(requests, executor, sink) -> None:
    assert requests.abort("a")
    assert not requests.abort("a")
    assert not requests.abandon("a")
    assert not requests.abandon("unknown")

    executor.send(make_output(0, "", CANCELLED))
    assert sink.endings == []  # abandoned: nobody listens


def test_an_aborted_request_hears_how_it_ended(requests, executor, sink) -> None:
    requests.abort("a")

    executor.send(make_output(0, "x", CANCELLED))

    assert (sink.text, sink.endings) == ("x", [FinishReason.CANCELLED])


def test_outputs_of_unknown_requests_are_ignored(requests, executor, sink) -> None:
    requests.add({"unanswered": Sink()})

    assert executor.send(make_output(5, "x", request_id="nobody")) == []
    assert executor.send(make_output(5, "x", request_id="unanswered")) == []


def test_a_lost_stream_fails_everything_once(requests, sink) -> None:
    requests.fail_all(LinkBrokenError("gone"))
    requests.fail_all(LinkBrokenError("gone"))

    assert sink.endings == [LinkBrokenError]
    assert len(requests) == 0


def test_an_echo_may_come_in_pieces_before_the_first_token(executor, sink) -> None:
    pieces = [pb.RequestOutput(request_id="a", prompt=gen.EchoedPrompt(text=t)) for t in "Hi"]

    executor.send(*pieces)
    executor.send(make_output(0, "x"))

    assert sink.prompts == [EchoedPrompt("H"), EchoedPrompt("i")]
    assert sink.text == "x"


def test_ids_of_a_prompt_come_with_an_echo(executor, sink) -> None:
    first = make_output(0, "x")
    first.prompt.CopyFrom(gen.EchoedPrompt(text="Hi", token_ids=[3, 4]))

    executor.send(first)

    assert sink.prompts == [EchoedPrompt("Hi", token_ids=(3, 4))]


def test_an_echo_is_heard_once_and_with_the_first_token(executor, sink) -> None:
    echo = gen.EchoedPrompt(text="Hi")
    first = make_output(0, "x")
    first.prompt.CopyFrom(echo)
    again = make_output(1, "y")
    again.prompt.CopyFrom(echo)

    executor.send(first)
    executor.send(again)

    assert sink.prompts == [EchoedPrompt("Hi")]
    assert sink.text == "xy"
