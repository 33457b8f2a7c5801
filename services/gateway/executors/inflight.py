"""The requests that one executor has in hand, and how its frames reach them. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from evenflow.executor.v1 import executor_pb2 as pb
from services.gateway import convert
from services.gateway.errors import DuplicateRequestError, LinkBrokenError
from services.gateway.types import RequestSink, Token
from services.generation.convert import prompt_from_proto
from services.kit.errors import ServiceError

DROPPED_TOKENS = Counter(
    "evenflow_gateway_duplicate_tokens_total", "Tokens that an executor sent twice; dropped."
)


@dataclass(slots=True)
class _Inflight:
    sink: RequestSink | None  # None: no reader is left, the executor has yet to end it
    is_accepted: bool = False
    is_aborted: bool = False  # the executor has been told
    num_tokens: int = 0  # taken so far
    num_prompt_tokens: int = 0  # about so many


class InflightRequests:
    """Dispatches the frames of one stream: drops what came before, fails on what is missing.

    A request stays in hand from `add` until the executor has rejected or ended it, even if
    no reader is left: until then its id may not be used again.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Inflight] = {}
        self._unreported: set[str] = set()  # those that no report of the executor's load has
        self._next_sequence = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(
        self, sinks: Mapping[str, RequestSink], *, num_known: int = 0, num_prompt_tokens: int = 0
    ) -> None:
        """Expect answers to requests, by their ids, from token `num_known` on, to a prompt of about
        `num_prompt_tokens`. Raises DuplicateRequestError, and expects none, if one is in hand.
        """
        for request_id in sinks:
            if request_id in self._requests:
                raise DuplicateRequestError(request_id)
        self._requests |= {
            request_id: _Inflight(sink, num_tokens=num_known, num_prompt_tokens=num_prompt_tokens)
            for request_id, sink in sinks.items()
        }
        self._unreported.update(sinks)

    def reported(self) -> None:
        """Take in that the executor has just told its load: of all that it has accepted."""
        self._unreported = {
            request_id
            for request_id in self._unreported
            if (request := self._requests.get(request_id)) and not request.is_accepted
        }

    @property
    def num_unreported_tokens(self) -> int:
        """Return about how many prompt tokens the newest report lacks; any thread may ask."""
        unreported = [self._requests.get(request_id) for request_id in tuple(self._unreported)]
        return sum(request.num_prompt_tokens for request in unreported if request is not None)

    @property
    def is_live(self) -> bool:
        """Say whether the executor has taken a request that it has not ended."""
        return any(request.is_accepted for request in self._requests.values())

    def is_waited_for(self, now_s: float) -> bool:
        """Say whether the executor has taken a request whose reader waits for tokens."""
        return any(
            request.is_accepted and request.sink is not None and request.sink.is_waited_for(now_s)
            for request in self._requests.values()
        )

    def abort(self, request_id: str) -> bool:
        """Note that a request shall end; its sink hears how. Returns whether to tell the executor:
        not if it has ended the request, or has been told.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_aborted:
            return False
        request.is_aborted = True
        return True

    def abandon(self, request_id: str) -> bool:
        """Like `abort`, but the sink hears nothing more."""
        request = self._requests.get(request_id)
        if request is not None:
            request.sink = None
        return self.abort(request_id)

    def apply(self, frame: pb.StreamResponse, arrived_s: float) -> list[str]:
        """Dispatch one frame. Returns requests that failed here and that the executor must abort.

        Raises LinkBrokenError, and dispatches nothing, if frames are missing before this one. A
        frame that came before is ignored.
        """
        if frame.sequence > self._next_sequence:
            raise LinkBrokenError(
                f"frame {self._next_sequence} is missing, frame {frame.sequence} came instead"
            )
        if frame.sequence < self._next_sequence:
            return []
        self._next_sequence += 1
        for accepted in frame.accepted:
            self._accept(accepted)
        for rejected in frame.rejected:
            self._reject(rejected)
        return [
            output.request_id for output in frame.outputs if not self._extend(output, arrived_s)
        ]

    def fail_all(self, error: ServiceError) -> None:
        """End every request with `error`; the stream is gone."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if request.sink is not None:
                request.sink.failed(error)

    def _accept(self, accepted: pb.Accepted) -> None:
        request = self._requests.get(accepted.request_id)
        if request is None or request.is_accepted:
            return
        request.is_accepted = True
        if request.sink is not None:
            request.sink.accepted(
                accepted.num_prompt_tokens, accepted.max_tokens, accepted.prompt_digest
            )

    def _reject(self, rejected: pb.Rejected) -> None:
        request = self._requests.pop(rejected.request_id, None)
        if request is not None and request.sink is not None:
            request.sink.rejected(convert.rejection_from_proto(rejected))

    def _extend(self, output: pb.RequestOutput, arrived_s: float) -> bool:
        """Pass on one request's news. Returns False if tokens are missing before it."""
        request = self._requests.get(output.request_id)
        if request is None or not request.is_accepted:
            return True
        if output.first_token_index > request.num_tokens:
            return self._fail_gap(output, request)
        if not request.num_tokens and request.sink is not None and output.HasField("prompt"):
            request.sink.echoed(prompt_from_proto(output.prompt))
        if tokens := _new_tokens(output, request.num_tokens):
            request.num_tokens += len(tokens)
            if request.sink is not None:
                request.sink.extended(tokens, arrived_s)
        if output.HasField("ending"):
            self._end(output, request)
        return True

    def _fail_gap(self, output: pb.RequestOutput, request: _Inflight) -> bool:
        """Fail a request that lost tokens. Returns False if the executor must be told to abort."""
        if request.sink is not None:
            request.sink.failed(
                LinkBrokenError(
                    f"token {request.num_tokens} is missing, "
                    f"token {output.first_token_index} came instead"
                )
            )
            request.sink = None
        if output.HasField("ending"):
            del self._requests[output.request_id]
        return not self.abort(output.request_id)

    def _end(self, output: pb.RequestOutput, request: _Inflight) -> None:
        del self._requests[output.request_id]
        if request.sink is None:
            return
        if output.ending.WhichOneof("how") == "failure":
            request.sink.failed(convert.failure_from_proto(output.ending.failure))
        else:
            if (retained := convert.retained_from_proto(output.ending)) is not None:
                request.sink.retained(retained)
            request.sink.ended(*convert.ending_from_proto(output.ending))


def _new_tokens(output: pb.RequestOutput, num_known: int) -> Sequence[Token]:
    """Return the tokens after the first `num_known` of the request; none is missing."""
    tokens: Sequence[pb.Token] = output.tokens
    if output.first_token_index != num_known:
        num_duplicates = min(num_known - output.first_token_index, len(tokens))
        DROPPED_TOKENS.inc(num_duplicates)
        tokens = tokens[num_duplicates:]
    return [convert.token_from_proto(token, index) for index, token in enumerate(tokens, num_known)]
