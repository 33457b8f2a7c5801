"""Failed responses: each API's shape, and its own names for what is at fault."""

import json
from typing import Any

import pytest

from services.gateway.http.faults import error_response, status_response
from services.kit.errors import InvalidRequestError


def told(field: str, path: str) -> Any:
    response = error_response(InvalidRequestError(f"{field}: no good", field=field), path)
    assert response.status_code == 400
    return json.loads(bytes(response.body))["error"]


@pytest.mark.parametrize(
    ("path", "field", "name"),
    [
        ("/v1/chat/completions", "response_format", "response_format"),
        ("/v1/responses", "response_format", "text.format"),
        ("/v1/responses", "messages", "input"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "prompt", "prompt"),
        ("/v1/messages", "response_format", "output_config.format"),
        ("/v1/messages", "max_tokens", "max_tokens"),
    ],
)
def test_a_parameter_is_blamed_by_its_name_in_the_api(path: str, field: str, name: str) -> None:
    error = told(field, path)

    assert error["message"] == f"{name}: no good"
    assert error.get("param", name) == name


def test_each_api_has_its_shape() -> None:
    assert set(told("n", "/v1/responses")) == {"message", "type", "param", "code"}
    assert set(told("n", "/v1/messages/count_tokens")) == {"message", "type"}
    assert (
        json.loads(bytes(status_response(404, "m", "/v1/messages/batches").body))["type"] == "error"
    )
