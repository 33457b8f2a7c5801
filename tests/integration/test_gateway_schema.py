"""What `/openapi.json` says: it is true, and enough to make requests from."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.access.fairness import FAIRNESS_HEADERS
from services.gateway.openai.sampled import HEADERS_BY_BOUND
from tests.fake_executor import MODEL, Script
from tests.fuzz import examples
from tests.gateway_thread import TIMEOUT_S, Edge, running_edge
from tests.integration.calling import SAID

FUZZ = settings(
    max_examples=examples(40),
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(3_600)  # at night there are many more examples
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
OPERATIONS = [
    *(("POST", path) for path in [*POSTS, "/ping"]),
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/streams/{stream_id}"),
    ("GET", "/v1/responses/{response_id}"),
    ("PATCH", "/v1/streams/{stream_id}"),
    ("GET", "/v1/evenflow/kv"),
    ("DELETE", "/v1/evenflow/sessions/{session_id}"),
]
ENDLESS = [("GET", "/v1/evenflow/watch")]
OF_A_TRACKER = [("GET", "/v1/evenflow/fleet")]  # test_gateway_directory.py has one


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    with running_edge() as edge:
        edge.run(edge.client.wait_ready())
        yield edge


@pytest.fixture(scope="module")
def document(edge: Edge) -> dict[str, Any]:
    response = httpx.get(f"{edge.client.base_url}/openapi.json", timeout=TIMEOUT_S)
    assert response.status_code == 200
    return dict(response.json())


def asked_of(case: Any, edge: Edge) -> httpx.Response:
    """Make a request, to the model that there is if it names any; check it against the document."""
    if isinstance(case.body, dict) and case.body.get("model"):
        case.body["model"] = MODEL
    response = case.call(base_url=edge.client.base_url, timeout=TIMEOUT_S)
    case.validate_response(response, checks=CHECKS)
    return response  # type: ignore[no-any-return]


def let_headers_agree(case: Any) -> None:
    """Let headers that say the same under two names agree: a schema cannot say that they must."""
    for own, *others in (*HEADERS_BY_BOUND.values(), FAIRNESS_HEADERS):
        for other in others:
            if own in case.headers and other in case.headers:
                case.headers[other] = case.headers[own]


def test_every_route_is_in_the_document(document: dict[str, Any]) -> None:
    described = {(m.upper(), path) for path, item in document["paths"].items() for m in item}

    assert described == {*OPERATIONS, *ENDLESS, *OF_A_TRACKER}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_requests_of_the_schema_are_answered_as_it_says(
    edge: Edge, document: dict[str, Any], method: str, path: str
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: list[int] = []

    @FUZZ
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def ask(case: Any) -> None:
        let_headers_agree(case)
        statuses.append(asked_of(case, edge).status_code)

    ask()

    num_good = statuses.count(200) + statuses.count(404)
    assert num_good >= 0.3 * len(statuses), "the schema lets through what is mostly refused"


@pytest.mark.parametrize("path", POSTS)
def test_requests_against_the_schema_are_answered_as_it_says(
    edge: Edge, document: dict[str, Any], path: str
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @FUZZ
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def ask(case: Any) -> None:
        asked_of(case, edge)

    ask()


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def test_every_schema_is_one_and_every_reference_leads_somewhere(document) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from references(item)

    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert {r.removeprefix("#/components/schemas/") for r in references(document)} <= set(schemas)
    assert not [name for name in schemas if "__" in name]  # two of one name


def test_every_operation_has_its_own_id_and_every_path_parameter_is_defined(document) -> None:
    operations = [
        (path, operation) for path, item in document["paths"].items() for operation in item.values()
    ]
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for path, operation in operations:
        defined = [p["name"] for p in operation["parameters"] if p["in"] == "path"]
        assert all(f"{{{name}}}" in path for name in defined)
        assert len(defined) == path.count("{")


def test_every_example_is_one_of_its_schema(document) -> None:
    num_examples = 0
    for item in document["paths"].values():
        for operation in item.values():
            told = [r.get("content", {}) for r in operation["responses"].values()]
            if "requestBody" in operation:
                told.append(operation["requestBody"]["content"])
            for content in told:
                for media in content.values():
                    shown = [e["value"] for e in media.get("examples", {}).values()]
                    shown += [media["example"]] if "example" in media else []
                    assert shown
                    for example in shown:
                        validator(document, media.get("schema", {})).validate(example)
                        num_examples += 1

    assert num_examples > 80


def test_every_example_of_a_body_is_answered(edge, document) -> None:
    for path in POSTS:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            body = example["value"] | {"model": MODEL}
            response = httpx.post(edge.client.base_url + path, json=body, timeout=TIMEOUT_S)
            assert response.status_code == 200, response.text


TOOL = {"name": "get_weather", "parameters": {"type": "object"}}
FULL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": TOOL}],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    },
    "/v1/completions": {"prompt": "Hi", "logprobs": 2, "echo": True, "return_token_ids": True},
    "/v1/responses": {
        "input": "Hi",
        "tools": [{"type": "function", **TOOL}],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
    },
}


def test_what_may_be_taken_up_again_is_said_to_be_a_stream(document) -> None:
    """In words: with a rule for it there are too many for schemathesis to make bodies of."""
    schemas = document["components"]["schemas"]
    for name in ("ServiceLevelBody", "CompletionLevelBody"):
        assert "only with `stream`" in schemas[name]["properties"]["resumable"]["description"]


@pytest.fixture
def calling(edge: Edge) -> Iterator[None]:
    """Have answers think, speak and call a function."""
    executor, before = edge.executor, edge.executor.script_for
    said = Script(texts=SAID, finish_reason=gen.FINISH_REASON_TOOL_CALLS, num_reasoning_tokens=2)
    executor.script_for = lambda _: said
    yield
    executor.script_for = before


@pytest.mark.usefixtures("calling")
@pytest.mark.parametrize("path", FULL)
def test_an_answer_with_everything_has_no_member_that_is_not_documented(
    edge, document, path
) -> None:
    body = FULL[path] | {"model": MODEL}

    response = httpx.post(edge.client.base_url + path, json=body, timeout=TIMEOUT_S)

    assert response.status_code == 200, response.text
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    validator(closed(document), content["application/json"]["schema"]).validate(response.json())


@pytest.mark.parametrize(
    ("path", "chunk"),
    [("/v1/chat/completions", "ChatCompletionChunk"), ("/v1/completions", "CompletionChunk")],
)
def test_events_have_no_member_that_is_not_documented(edge, document, path, chunk, request) -> None:
    if "chat" in path:
        request.getfixturevalue("calling")
    body = FULL[path] | {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}

    response = httpx.post(edge.client.base_url + path, json=body, timeout=TIMEOUT_S)

    schema = {"$ref": f"#/components/schemas/{chunk}"}
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert (len(events) > 3, done) == (True, "data: [DONE]")
    for event in events:
        told = json.loads(event.removeprefix("data: "))
        validator(closed(document), schema).validate(told)


def closed(value: Any) -> Any:
    """Return schemas of which objects have no other members than those listed."""
    if isinstance(value, list):
        return [closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {name: closed(member) for name, member in value.items()}
    return {"additionalProperties": False, **inner} if "properties" in value else inner
