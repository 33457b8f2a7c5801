"""What `/openapi.json` says."""

from typing import Any

from pydantic import TypeAdapter

from services.gateway.anthropic import schemas as anthropic
from services.gateway.http.operations import DELETES, GETS, PATCHES, POSTS, REF
from services.gateway.openai import schemas as openai


def openapi_document(version: str) -> dict[str, Any]:
    """Return what `/openapi.json` says of this version. FastAPI's own would lack each null of the
    examples, and schemas for bodies that it does not decode itself.
    """
    paths: dict[str, Any] = {}
    methods = {"get": GETS, "post": POSTS, "patch": PATCHES, "delete": DELETES}
    for method, operations in methods.items():
        for path, asked in operations.items():
            paths.setdefault(path.replace(":path", ""), {})[method] = asked.described(path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Evenflow",
            "version": version,
            "description": "OpenAI's and Anthropic's APIs with paced streams and service levels.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"ApiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"ApiKey": []}],  # keys are asked for where there are some
    }


def _schemas() -> dict[str, Any]:
    """Return what the operations refer to; with it the events of OpenAI's streams."""
    operations = [*POSTS.values(), *GETS.values(), *PATCHES.values(), *DELETES.values()]
    bodies = {operation.body for operation in operations if operation.body}
    answers = {operation.answer for operation in operations if operation.answer} | {
        anthropic.MessageFaultAnswer,
        openai.ChatCompletionChunk,
        openai.CompletionChunk,
        openai.FaultAnswer,
    }
    adapters = [(cls.__name__, TypeAdapter(cls)) for cls in bodies | answers]
    _, defined = TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters], ref_template=REF
    )
    schemas: dict[str, Any] = defined["$defs"]
    return schemas
