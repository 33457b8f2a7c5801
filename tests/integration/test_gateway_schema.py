"""What `/openapi.json` says: requests made from it, right and wrong, never fail in the gateway."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.fuzz import examples
from tests.gateway_thread import TIMEOUT_S, Edge, running_edge

FUZZ = settings(
    max_examples=examples(40),
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(3_600)  # at night there are many more examples
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


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


def test_every_route_is_in_the_document(document: dict[str, Any]) -> None:
    described = {(m.upper(), path) for path, item in document["paths"].items() for m in item}

    assert described == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    # Of what the others take, nothing is wrong by its type.
    + [
        (*operation, GenerationMode.NEGATIVE)
        for operation in OPERATIONS
        if "POST" in operation and "/ping" not in operation
    ],
)
def test_no_request_of_the_schema_or_against_it_is_a_failure_of_ours(
    edge: Edge, document: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @FUZZ
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=edge.client.base_url, timeout=TIMEOUT_S)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            told = {"message", "type"} | (set() if "messages" in path else {"param", "code"})
            assert set(json.loads(response.text)["error"]) >= told

    ask()
