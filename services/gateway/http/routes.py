"""The HTTP edge: endpoints of OpenAI and of Anthropic, probes and metrics."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from services.gateway.access.api_keys import check_admin
from services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.anthropic.events import MessageForm
from services.gateway.anthropic.objects import MessageHead
from services.gateway.anthropic.requests import to_generation_request as to_message_request
from services.gateway.anthropic.requests import to_prompt
from services.gateway.errors import UnknownModelError, UnknownRequestError
from services.gateway.executors.directory import TrackerDirectory
from services.gateway.executors.watches import Watches
from services.gateway.http.answers import Form, StreamedAnswers, WholeAnswers
from services.gateway.http.edge import IGNORED_PARAMETERS, LargeBodies, decode_json, read_body
from services.gateway.http.faults import error_response, own_name, status_response
from services.gateway.http.openapi import openapi_document
from services.gateway.http.operations import DELETES, GETS, INDEX, PATCHES, POSTS
from services.gateway.http.protocol import SAFE_METHODS
from services.gateway.http.resuming import (
    LAST_EVENT_ID,
    STARTING_AFTER,
    LastEvent,
    ResumableAnswers,
    TakenUpStream,
    last_event_by_id,
    last_event_by_number,
)
from services.gateway.http.watching import WatchedEngines, holders_limit, updates_per_s
from services.gateway.left_out.template_variables import without_unread
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.live.repacing import repace
from services.gateway.openai import errors as openai_errors
from services.gateway.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    RequestBody,
    TokenizeBody,
)
from services.gateway.openai.parsing import BodyT, parse_body
from services.gateway.openai.requests import to_generation_requests
from services.gateway.openai.responses import (
    AnswerHead,
    AnswerKind,
    ChatForm,
    model_entry,
    pace_entry,
)
from services.gateway.openai.sampled import PACE_NAMES, PaceBody, SampledBody
from services.gateway.responses_api.bodies import ResponsesBody
from services.gateway.responses_api.events import ResponseForm
from services.gateway.responses_api.objects import ID_PREFIX, response_head
from services.gateway.responses_api.requests import to_generation_request as to_response_request
from services.gateway.resumable.stream import ResumableStream
from services.gateway.resumable.streams import ResumableStreams
from services.gateway.types import Delivery, GenerationRequest, RequestId
from services.generation.prompts import ChatPrompt, TokenizeOptions
from services.generation.sampling_params import SamplingParams
from services.kit.clock import wall_s
from services.kit.errors import InvalidRequestError, ServiceError, UnavailableError
from services.kit.rpc import current_request_id

AskingT = TypeVar("AskingT", bound=SampledBody)
MadeT = TypeVar("MadeT")

VERSION = "0.1.0"  # of pyproject.toml
NEXT_PREFIX = "evenflow.next_prefix"
MIN_BODY_LIMIT_BYTES = 1 << 20
BODY_BYTES_PER_CONTEXT_TOKEN = 16


class ApiRoutes:
    """Handlers of the operations, each by its id, bound to one dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        streams: ResumableStreams,
        watches: Watches,
        directory: TrackerDirectory | None,
        *,
        keepalive_s: float,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._streams = streams
        self._watches = watches
        self._keepalive_s = keepalive_s
        self._started_s = int(wall_s())
        self._large_bodies = LargeBodies()

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, ChatCompletionBody, AnswerKind.CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, AnswerKind.COMPLETION)

    async def responses(self, request: Request) -> Response:
        body, asked = await self._asked(request, ResponsesBody, to_response_request)
        (asked,) = self._seen(request, body, [asked])
        head = response_head(body, asked, created_s=int(time.time()))
        return self._answers([asked], ResponseForm(head))

    async def messages(self, request: Request) -> Response:
        body, asked = await self._asked(request, MessagesBody, to_message_request)
        (asked,) = self._seen(request, body, [asked])
        head = MessageHead(
            request_id=asked.request_id, model=body.model, uses_extension=body.uses_extension
        )
        return self._answers([asked], MessageForm(head))

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request, CountTokensBody)
        prompt = self._seen_prompt(request, body.model, to_prompt(body))
        tokens = await self._dispatcher.tokenize(body.model, prompt, TokenizeOptions())
        return JSONResponse({"input_tokens": len(tokens.ids)})

    async def index(self, request: Request) -> Response:
        return JSONResponse(INDEX)

    async def list_models(self, request: Request) -> Response:
        models = [model_entry(model, self._started_s) for model in self._dispatcher.models()]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        for model in self._dispatcher.models():
            if model.model.rstrip("/") == model_id:
                return JSONResponse(model_entry(model, self._started_s))
        raise UnknownModelError(model_id)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    ping = health

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._dispatcher.num_live})

    async def ready(self, request: Request) -> Response:
        if self._dispatcher.is_ready:
            return JSONResponse({"status": "ready"})
        body = openai_errors.error_body(
            503, "no executor is connected, or the gateway is shutting down", code="not_ready"
        )
        return JSONResponse(body, status_code=503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def change_pace(self, request: Request) -> Response:
        body = await self._body(request, PaceBody)
        name = RequestId(request.path_params["stream_id"])
        level = repace(self._dispatcher, name, body.stated(), PACE_NAMES)
        return JSONResponse(pace_entry(name, level))

    async def release_session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        num_tokens = await self._dispatcher.release_session(session_id)
        return JSONResponse({"id": session_id, "released_tokens": num_tokens})

    async def take_up_stream(self, request: Request) -> Response:
        request_id = RequestId(request.path_params["stream_id"])
        stream = self._streams.named(request_id)
        if stream.form is None:
            raise UnknownRequestError(f'the stream "{request_id}" was begun over gRPC')
        last, asked = None, request.query_params
        if (stated := request.headers.get(LAST_EVENT_ID)) is not None:
            last = last_event_by_id(request_id, stated, LAST_EVENT_ID)
        elif (stated := asked.get(STARTING_AFTER)) is not None:
            last = last_event_by_id(request_id, stated, STARTING_AFTER)
        return self._taken_up(request, stream, last)

    async def take_up_response(self, request: Request) -> Response:
        response_id, asked = request.path_params["response_id"], request.query_params
        request_id = RequestId(response_id.removeprefix(ID_PREFIX))
        stream = self._streams.named(request_id)
        if request_id == response_id or not isinstance(stream.form, ResponseForm):
            raise UnknownRequestError(f'no resumable response has the id "{response_id}"')
        if asked.get("stream") != "true":
            rule = "must be true: responses are kept as streams"
            raise InvalidRequestError(f"stream: {rule}", field="stream")
        last = None
        if (stated := asked.get(STARTING_AFTER)) is not None:
            last = last_event_by_number(stated, STARTING_AFTER)
        return self._taken_up(request, stream, last)

    def _taken_up(
        self, request: Request, stream: ResumableStream, last: LastEvent | None
    ) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return TakenUpStream(stream, last, keepalive_s=self._keepalive_s)

    async def watch_engines(self, request: Request) -> Response:
        rate = updates_per_s(request.query_params.get("max_updates_per_s"))
        self._watches.check_room()
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return WatchedEngines(self._watches, max_updates_per_s=rate, keepalive_s=self._keepalive_s)

    async def show_fleet(self, request: Request) -> Response:
        if self._directory is None:
            raise UnavailableError("this gateway has no tracker, which knows of all executors")
        return JSONResponse({"executors": await self._directory.fleet()})

    async def show_kv(self, request: Request) -> Response:
        check_admin()
        limit = holders_limit(request.query_params.get("limit"))
        self._watches.check_room()
        return JSONResponse(await self._watches.kv_holders(limit))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        options = TokenizeOptions(
            omits_special_tokens=not body.add_special_tokens,
            omits_generation_prompt=not body.add_generation_prompt,
            with_texts=body.return_token_strs,
        )
        tokens = await self._dispatcher.tokenize(body.model, body.checked_prompt(), options)
        return JSONResponse(
            {
                "count": len(tokens.ids),
                "max_model_len": tokens.max_model_len,
                "tokens": tokens.ids,
                "token_strs": tokens.texts if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        text = await self._dispatcher.detokenize(body.model, body.tokens)
        return JSONResponse({"prompt": text})

    async def _answer(
        self, request: Request, body_class: type[RequestBody], kind: AnswerKind
    ) -> Response:
        body, requests = await self._asked(request, body_class, to_generation_requests)
        requests = self._seen(request, body, requests)
        head = AnswerHead(
            kind=kind,
            request_id=RequestId(current_request_id()),
            model=body.model,
            created_s=int(time.time()),
            answers_per_prompt=body.n,
            is_prompt_only=body.wants_no_answer,
            has_token_ids=body.tells_token_ids,
            names_tokens_by_id=body.return_tokens_as_token_ids,
            uses_extension=body.uses_extension,
        )
        form = ChatForm(
            head,
            includes_usage=body.includes_usage,
            counts_each_event=body.counts_each_event,
            limit_name=body.limit_name,
        )
        return self._answers(requests, form)

    def _seen(
        self, request: Request, body: SampledBody, asked: list[GenerationRequest]
    ) -> list[GenerationRequest]:
        """Return requests of which the chat template sees every option, unless the body is strict:
        then the executor refuses the others.
        """
        self._check_next_prefix(request, body)
        prompt = asked[0].prompt
        if body.evenflow.strict or not isinstance(prompt, ChatPrompt):
            return asked
        seen = self._seen_prompt(request, body.model, prompt)
        return asked if seen is prompt else [replace(one, prompt=seen) for one in asked]

    def _check_next_prefix(self, request: Request, body: SampledBody) -> None:
        """Have the response's header say that no prefix is computed ahead where none is cached.
        Raises InvalidRequestError instead if the body is strict.
        """
        if not body.evenflow.next_prefix or self._dispatcher.caches_prefixes(body.model):
            return
        if body.evenflow.strict:
            message = f"{NEXT_PREFIX}: the model's prefixes are not cached"
            raise InvalidRequestError(message, field=NEXT_PREFIX)
        request.scope[IGNORED_PARAMETERS].add(NEXT_PREFIX)

    def _seen_prompt(self, request: Request, model: str, prompt: ChatPrompt) -> ChatPrompt:
        """Return a conversation without the options that the chat template would not see; their
        names go to the response's header.
        """
        left_out: set[str] = set()
        known = self._dispatcher.template_variables(model)
        options = without_unread(prompt.options, known, left_out)
        path = request.url.path
        request.scope[IGNORED_PARAMETERS] |= {own_name(name, path) for name in left_out}
        return prompt if options is prompt.options else ChatPrompt(prompt.messages, options)

    def _answers(self, requests: list[GenerationRequest], form: Form) -> Response:
        if requests[0].delivery is Delivery.WHOLE:
            return WholeAnswers(self._dispatcher, requests, form)
        if requests[0].is_resumable:
            return ResumableAnswers(
                self._dispatcher,
                requests,
                form,
                streams=self._streams,
                keepalive_s=self._keepalive_s,
            )
        return StreamedAnswers(self._dispatcher, requests, form, keepalive_s=self._keepalive_s)

    async def _asked(
        self,
        request: Request,
        body_class: type[AskingT],
        to_requests: Callable[[AskingT, Headers, RequestId, SamplingParams], MadeT],
    ) -> tuple[AskingT, MadeT]:
        """Return the checked body, and what it asks the dispatcher for."""
        request_id = RequestId(current_request_id())

        def asked(body: AskingT) -> tuple[AskingT, MadeT]:
            default = self._dispatcher.default_sampling(body.model)
            return body, to_requests(body, request.headers, request_id, default)

        return await self._read(request, body_class, asked)

    async def _body(self, request: Request, body_class: type[BodyT]) -> BodyT:
        return await self._read(request, body_class, lambda body: body)

    async def _read(
        self, request: Request, body_class: type[BodyT], made: Callable[[BodyT], MadeT]
    ) -> MadeT:
        """Return what is made of the checked body; names of what it says in vain go to the
        response's header.
        """
        content = await read_body(request, max_bytes=self._body_limit())
        ignored: set[str] = request.scope.setdefault(IGNORED_PARAMETERS, set())

        def checked() -> MadeT:
            return made(parse_body(body_class, decode_json(content), ignored))

        return await self._large_bodies.read(content, checked)

    def _body_limit(self) -> int:
        """Return how many bytes a body may have: room for the longest prompt there is."""
        longest = max((model.max_model_len for model in self._dispatcher.models()), default=0)
        return max(MIN_BODY_LIMIT_BYTES, BODY_BYTES_PER_CONTEXT_TOKEN * longest)


def make_app(
    dispatcher: Dispatcher,
    streams: ResumableStreams,
    watches: Watches,
    directory: TrackerDirectory | None,
    *,
    keepalive_s: float,
) -> FastAPI:
    """Return the HTTP application; `HttpEdge` goes around it. `directory`: None without a tracker.

    A stream without an event for `keepalive_s` gets a comment; 0: never.
    """
    routes = ApiRoutes(dispatcher, streams, watches, directory, keepalive_s=keepalive_s)
    app = FastAPI(
        title="Evenflow",
        redirect_slashes=False,
        exception_handlers={Exception: _error, ServiceError: _error, HTTPException: _http_error},
    )
    for path, operation in {**POSTS, **GETS}.items():  # a path in both is answered alike
        methods = [*SAFE_METHODS] * (path in GETS) + ["POST"] * (path in POSTS)
        app.add_api_route(path, getattr(routes, operation.id), methods=methods)
    for method, operations in (("PATCH", PATCHES), ("DELETE", DELETES)):
        for path, operation in operations.items():
            app.add_api_route(path, getattr(routes, operation.id), methods=[method])
    app.openapi_schema = openapi_document(VERSION)
    return app


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Shape what the router says itself: no such route, no such method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {str(error.detail).lower()}"
    return status_response(error.status_code, message, path, headers=error.headers)
