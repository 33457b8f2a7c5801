"""The calls of the HTTP API, as `/openapi.json` describes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from services.gateway.access.fairness import FAIRNESS_HEADERS, MAX_FAIRNESS_ID_LENGTH
from services.gateway.anthropic import schemas as anthropic
from services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.anthropic.events import MessageForm
from services.gateway.anthropic.objects import MessageHead
from services.gateway.checks import MAX_SLO_S, MIN_SLO_S, SESSION_HEADER
from services.gateway.executors.kv_holders import EXAMPLE, KVHolders
from services.gateway.http.answers import Form
from services.gateway.http.edge import IGNORED_HEADER
from services.gateway.http.faults import ANTHROPIC_PATH, FAULTS, error_response
from services.gateway.http.protocol import refusal
from services.gateway.http.resuming import (
    EVENT_ID,
    LAST_EVENT_ID,
    MAX_DIGITS,
    MAX_ID_CHARACTERS,
    STARTING_AFTER,
)
from services.gateway.http.watching import (
    DEFAULT_HOLDERS,
    DEFAULT_UPDATES_PER_S,
    MAX_HOLDERS,
    MAX_UPDATES_PER_S,
)
from services.gateway.openai import schemas as openai
from services.gateway.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from services.gateway.openai.parsing import parse_body
from services.gateway.openai.requests import MAX_PARENT_ID_LENGTH
from services.gateway.openai.responses import (
    Answer,
    AnswerHead,
    AnswerKind,
    ChatForm,
    model_entry,
)
from services.gateway.openai.sampled import HEADERS_BY_BOUND, PaceBody
from services.gateway.responses_api import schemas as responses_api
from services.gateway.responses_api.bodies import ResponsesBody
from services.gateway.responses_api.events import ResponseForm
from services.gateway.responses_api.objects import response_head
from services.gateway.responses_api.requests import to_generation_request
from services.gateway.types import (
    MAX_RATE_TPS,
    MIN_RATE_TPS,
    Finish,
    RequestId,
    ServedModel,
    Token,
)
from services.generation.finish import FinishReason
from services.kit.rpc import REQUEST_ID_KEY

REF = "#/components/schemas/{model}"
_MODEL = "my-model"
_ID = RequestId("9f2c4e")
_CREATED_S = 1_767_225_600
_TURN = {"role": "user", "content": "Say hello."}
_TOKENS = (Token(0, 9906, "Hello"), Token(1, 0, "!"))
_FINISH = Finish(reason=FinishReason.STOP, num_prompt_tokens=9, num_output_tokens=3)

_OF_CONNECTIONS = (400, 408, 431, 503)  # whatever is called
_WITH_KEYS = (*_OF_CONNECTIONS, 401, 403, 500)
_WITH_A_BODY = (*_WITH_KEYS, 404, 413, 415, 429, 504)
_GENERATING = (*_WITH_A_BODY, 409)

_REFUSALS = MappingProxyType({408: "Head or body came too slowly.", 431: "The head is too large."})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call: what it takes, and what it answers."""

    summary: str
    answer: Any = None  # type of the JSON of a 200; None: text
    told: Any = None  # such an answer; None: there are streams only
    events: bytes = b""  # such an answer as a stream, where there are streams
    body: type[BaseModel] | None = None
    asked: Sequence[Mapping[str, Any]] = ()  # such bodies
    nothing: str = ""  # what a 204 says; empty: there is none
    faults: Sequence[int] = _WITH_KEYS
    parameters: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Return what the document calls it, and `ApiRoutes` its handler."""
        return self.summary.lower().replace(" ", "_")

    def described(self, path: str) -> dict[str, Any]:
        """Return the call at `path` in OpenAPI's terms."""
        statuses = {str(status): _fault(status, path) for status in sorted(self.faults)}
        if self.nothing:
            statuses["204"] = {"description": self.nothing}
        described: dict[str, Any] = {
            "operationId": self.id,
            "summary": self.summary,
            "parameters": [_stated(REQUEST_ID_KEY, "header", _REQUEST_ID), *self.parameters],
            "responses": {"200": self._success()} | statuses,
        }
        if self.body is not None:
            examples = {_name(asked): {"value": asked} for asked in self.asked}
            content = {"application/json": {"schema": _ref(self.body), "examples": examples}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def _success(self) -> dict[str, Any]:
        headers = [REQUEST_ID_KEY] + ([IGNORED_HEADER] if self.body else [])
        told: dict[str, Any] = {}
        if self.answer is None and self.told is not None:
            told = {"text/plain": {"schema": {"type": "string"}, "example": self.told}}
        if self.answer is not None:
            told = {"application/json": {"schema": _ref(self.answer), "example": self.told}}
        if self.events:
            told["text/event-stream"] = {"example": self.events.decode()}
        return {"description": "Done.", "headers": _headers(headers), "content": told}


def _name(asked: Mapping[str, Any]) -> str:
    return "streamed" if asked.get("stream") else "whole"


def _ref(answer: type) -> dict[str, str]:
    return {"$ref": REF.format(model=answer.__name__)}


def _headers(names: Sequence[str]) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}} for name in names}


def _stated(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


_REQUEST_ID = {"type": "string", "pattern": f"^[A-Za-z0-9_.:-]{{1,{MAX_PARENT_ID_LENGTH}}}$"}


def _service_level() -> list[dict[str, Any]]:
    """Describe the headers that state a service level, a session, and a fairness id."""
    slo = {"type": "number", "minimum": MIN_SLO_S * 1e3, "maximum": MAX_SLO_S * 1e3}
    rate = {"type": "number", "minimum": MIN_RATE_TPS, "maximum": MAX_RATE_TPS}
    bounds = [
        _stated(name, "header", slo if bound.endswith("_ms") else rate)
        for bound, names in HEADERS_BY_BOUND.items()
        for name in names
    ]
    fairness_id = {"type": "string", "maxLength": MAX_FAIRNESS_ID_LENGTH}
    fairness = [_stated(name, "header", fairness_id) for name in FAIRNESS_HEADERS]
    return [*bounds, _stated(SESSION_HEADER, "header", {"type": "string"}), *fairness]


def _fault(status: int, path: str) -> dict[str, Any]:
    """Describe a failure: each API has its own shape, connections have OpenAI's."""
    shape: dict[str, Any] = _ref(openai.FaultAnswer)
    headers = [REQUEST_ID_KEY]
    if status in _REFUSALS:
        description, example = _REFUSALS[status], refusal(status)
    else:
        description, error = FAULTS[status]
        response = error_response(error, path)
        example = json.loads(bytes(response.body))
        headers += [name for name in response.headers if not name.startswith("content-")]
        if path.startswith(ANTHROPIC_PATH):
            example["request_id"] = _ID
            own = _ref(anthropic.MessageFaultAnswer)
            shape = {"anyOf": [own, shape]} if status in _OF_CONNECTIONS else own
    content = {"application/json": {"schema": shape, "example": example}}
    return {"description": description, "headers": _headers(headers), "content": content}


def _whole(form: Form) -> dict[str, Any]:
    return form.whole([Answer(tokens=_TOKENS, finish=_FINISH)])


def _streamed(form: Form) -> bytes:
    writer = form.writer(0, _FINISH.num_prompt_tokens)
    said = writer.beginning() + writer.tokens(_TOKENS) + writer.ending(_FINISH)
    return said + form.last_events([_FINISH])


def _generating(summary: str, body: type[BaseModel], answer: Any, form: Form, **asked: Any) -> Any:
    whole = {"model": _MODEL, **asked}
    return Operation(
        summary=summary,
        answer=answer,
        told=_whole(form),
        events=_streamed(form),
        body=body,
        asked=[whole, whole | {"stream": True, "evenflow": {"consumption_rate_tps": 20}}],
        faults=_GENERATING,
        parameters=_service_level(),
    )


def _form(kind: AnswerKind) -> ChatForm:
    return ChatForm(AnswerHead(kind=kind, request_id=_ID, model=_MODEL, created_s=_CREATED_S))


def _response_form() -> ResponseForm:
    body = parse_body(ResponsesBody, {"model": _MODEL, "input": "Say hello."})
    asked = to_generation_request(body, {}, _ID)
    return ResponseForm(response_head(body, asked, created_s=_CREATED_S))


def _posts() -> dict[str, Operation]:
    return _generations() | _counts() | {"/ping": Operation(summary="Ping by POST", **_HEALTH)}


def _generations() -> dict[str, Operation]:
    message_form = MessageForm(MessageHead(request_id=_ID, model=_MODEL))
    return {
        "/v1/chat/completions": _generating(
            "Chat completions",
            ChatCompletionBody,
            openai.ChatCompletion,
            _form(AnswerKind.CHAT),
            messages=[_TURN],
        ),
        "/v1/completions": _generating(
            "Completions",
            CompletionBody,
            openai.Completion,
            _form(AnswerKind.COMPLETION),
            prompt="Say hello.",
        ),
        "/v1/responses": _generating(
            "Responses",
            ResponsesBody,
            responses_api.AnsweredResponse,
            _response_form(),
            input="Say hello.",
        ),
        "/v1/messages": _generating(
            "Messages",
            MessagesBody,
            anthropic.AnsweredMessage,
            message_form,
            max_tokens=64,
            messages=[_TURN],
        ),
    }


def _counts() -> dict[str, Operation]:
    return {
        "/v1/messages/count_tokens": Operation(
            summary="Count tokens",
            body=CountTokensBody,
            asked=[{"model": _MODEL, "messages": [_TURN]}],
            answer=anthropic.TokenCount,
            told={"input_tokens": 9},
            faults=_WITH_A_BODY,
        ),
        "/tokenize": Operation(
            summary="Tokenize",
            body=TokenizeBody,
            asked=[{"model": _MODEL, "prompt": "Hello!"}],
            answer=openai.Tokens,
            told={"count": 2, "max_model_len": 4096, "tokens": [9906, 0], "token_strs": None},
            faults=_WITH_A_BODY,
        ),
        "/detokenize": Operation(
            summary="Detokenize",
            body=DetokenizeBody,
            asked=[{"model": _MODEL, "tokens": [9906, 0]}],
            answer=openai.DetokenizedText,
            told={"prompt": "Hello!"},
            faults=_WITH_A_BODY,
        ),
    }


_ENTRY = model_entry(ServedModel(executor_id="", model=_MODEL, max_model_len=4_096), _CREATED_S)
_HEALTH: Any = {
    "answer": openai.Status,
    "told": {"status": "ok"},
    "faults": _OF_CONNECTIONS,
}
INDEX: openai.Index = {
    "name": "Evenflow",
    "models": "/v1/models",
    "openapi": "/openapi.json",
    "docs": "/docs",
}
_UPDATE = {"executor": "executor-0:50051", "is_connected": False}
_EXECUTOR = {
    "executor_id": "executor-0",
    "address": "executor-0:50051",
    "model": "some-model",
    "lease_ttl_s": 4.2,
    "load": {
        "num_running_reqs": 1,
        "num_newcomers": 0,
        "num_newcomer_tokens": 0,
        "prefill_tps": 4200.0,
        "kv_unavailable_frac": 0.1,
        "deposit_s": 3.5,
        "reading_load_frac": 0.2,
    },
    "requests": [
        {
            "request_id": _ID,
            "gateway_id": "gateway-0",
            "state": "decoding",
            "num_prompt_tokens": 12,
            "num_generated_tokens": 40,
            "num_delivered_tokens": 21,
            "num_deposited_tokens": 19,
        }
    ],
}
_HOLDERS_LIMIT = {
    "type": "integer",
    "minimum": 1,
    "maximum": MAX_HOLDERS,
    "default": DEFAULT_HOLDERS,
}
_UPDATE_RATE = {
    "type": "number",
    "exclusiveMinimum": 0,
    "maximum": MAX_UPDATES_PER_S,
    "default": DEFAULT_UPDATES_PER_S,
}
_A_NAME = {"type": "string", "minLength": 1}
_ONE_MODEL = _stated("model_id", "path", _A_NAME)
_ONE_STREAM = _stated("stream_id", "path", _A_NAME)
_PACE = {"slo_tbt_ms": None, "consumption_rate_tps": 12.0}
_AN_EVENT = {"type": "string", "pattern": EVENT_ID.pattern, "maxLength": MAX_ID_CHARACTERS}
_A_NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1}
_NO_EVENT = "There was no event after that one."

PATCHES: Mapping[str, Operation] = MappingProxyType(
    {
        "/v1/streams/{stream_id}": Operation(
            summary="Change pace",
            body=PaceBody,
            asked=[_PACE],
            answer=openai.Pace,
            told={"id": _ID, "slo_tpot_ms": None, **_PACE},
            parameters=[_ONE_STREAM],
            faults=(*_WITH_KEYS, 404, 413, 415),
        )
    }
)
DELETES: Mapping[str, Operation] = MappingProxyType(
    {
        "/v1/evenflow/sessions/{session_id:path}": Operation(
            summary="Release session",
            answer=openai.ReleasedSession,
            told={"id": "agent-7", "released_tokens": 4_096},
            parameters=[_stated("session_id", "path", _A_NAME)],
            faults=(*_WITH_KEYS, 404),
        )
    }
)
POSTS: Mapping[str, Operation] = MappingProxyType(_posts())
GETS: Mapping[str, Operation] = MappingProxyType(
    {
        "/": Operation(summary="Index", answer=openai.Index, told=INDEX, faults=_OF_CONNECTIONS),
        "/v1/streams/{stream_id}": Operation(
            summary="Take up stream",
            nothing=_NO_EVENT,
            events=b"id: %b/1\n%b" % (_ID.encode(), _streamed(_form(AnswerKind.CHAT))),
            parameters=[
                _ONE_STREAM,
                _stated(LAST_EVENT_ID, "header", _AN_EVENT),
                _stated(STARTING_AFTER, "query", _AN_EVENT),
            ],
            faults=(*_WITH_KEYS, 404, 410),
        ),
        "/v1/responses/{response_id}": Operation(
            summary="Take up response",
            nothing=_NO_EVENT,
            events=_streamed(_response_form()),
            parameters=[
                _stated("response_id", "path", _A_NAME),
                _stated("stream", "query", {"const": True}) | {"required": True},
                _stated(STARTING_AFTER, "query", _A_NUMBER),
            ],
            faults=(*_WITH_KEYS, 404, 410),
        ),
        "/v1/models": Operation(
            summary="List models",
            answer=openai.ModelList,
            told={"object": "list", "data": [_ENTRY]},
        ),
        "/v1/models/{model_id:path}": Operation(
            summary="Get model",
            answer=openai.Model,
            told=_ENTRY,
            parameters=[_ONE_MODEL],
            faults=(*_WITH_KEYS, 404),
        ),
        "/health": Operation(summary="Health", **_HEALTH),
        "/ping": Operation(summary="Ping", **_HEALTH),
        "/version": Operation(summary="Version", answer=openai.Version, told={"version": "0.1.0"}),
        "/load": Operation(summary="Load", answer=openai.Load, told={"server_load": 3}),
        "/ready": Operation(
            summary="Ready", answer=openai.Status, told={"status": "ready"}, faults=_OF_CONNECTIONS
        ),
        "/v1/evenflow/watch": Operation(
            summary="Watch engines",
            events=b"data: %b\n\n" % json.dumps(_UPDATE).encode(),
            parameters=[_stated("max_updates_per_s", "query", _UPDATE_RATE)],
            faults=(*_WITH_KEYS, 429),
        ),
        "/v1/evenflow/fleet": Operation(
            summary="Show fleet",
            answer=openai.Fleet,
            told={"executors": [_EXECUTOR]},
        ),
        "/v1/evenflow/kv": Operation(
            summary="Show KV",
            answer=KVHolders,
            told=EXAMPLE,
            parameters=[_stated("limit", "query", _HOLDERS_LIMIT)],
            faults=(*_WITH_KEYS, 429),
        ),
        "/metrics": Operation(summary="Metrics", told="evenflow_gateway_live_requests 3.0\n"),
    }
)
