"""A server that speaks OpenAI's HTTP API, as the commands reach it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 10.0


class AnswerError(Exception):
    """A request failed; the message is the server's."""


class RefusedError(AnswerError):
    """The server refused a request."""

    def __init__(self, status: int, body: str) -> None:
        self.param = ""  # the parameter at fault, if the server names one
        message = body.strip()
        with suppress(ValueError, LookupError, TypeError):  # not in OpenAI's form
            error = json.loads(body)["error"]
            message, self.param = error["message"], error.get("param") or ""
        super().__init__(f"HTTP {status}: {message}")


class UnreachableError(AnswerError):
    """Nothing answers there; the message is a sentence for the user."""

    def __init__(self, base_url: str) -> None:
        super().__init__(f"no server answers at {base_url}; `evenflow serve MODEL` starts one here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is, and what it wants to see."""

    base_url: str  # without /v1
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # of every request

    def models(self) -> list[str]:
        """Return the ids of the models that are served, the first one first.

        Raises AnswerError: UnreachableError, RefusedError, or one for another kind of server.
        """
        try:
            return [str(model["id"]) for model in self.get("/v1/models")["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerError(f"what answers at {self.base_url} is no OpenAI API") from error

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises UnreachableError, RefusedError, and ValueError if it is
        none.
        """
        try:
            answer = httpx.get(f"{self.base_url}{path}", headers=self.headers, timeout=TIMEOUT_S)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(self.base_url) from error
        if answer.status_code != httpx.codes.OK:
            raise RefusedError(answer.status_code, answer.text)
        return answer.json()

    def of_gateway(self, path: str, *names: str) -> Mapping[str, Any]:
        """Return these members of a gateway's answer at a path. Raises AnswerError: as `get`, or
        one for another kind of server.
        """
        try:
            answer = self.get(path)
            return {name: answer[name] for name in names}
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerError(f"what answers at {self.base_url} is no gateway") from error


def endpoint_at(url: str, api_key: str = "") -> Endpoint:
    """Return the endpoint that a user means by `url`, with or without http:// and /v1."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    whole = url if "://" in url else f"http://{url}"
    return Endpoint(base_url=whole.rstrip("/").removesuffix("/v1").rstrip("/"), headers=headers)
