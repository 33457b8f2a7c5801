"""`POST /v1/evenflow/size`: the page's form of `evenflow size`, answered by the simulator.

A search takes seconds to minutes of one core, so the simulator runs in a process of its own, behind
all that serves (`simulator/form.py`). The gateway imports nothing of it: an image without the
simulator answers 503.
"""

import asyncio
import json
import sys
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.http.edge import decode_json, read_body, while_connected
from services.gateway.live.dispatcher import Dispatcher
from services.kit.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

SIZE_PATH = "/v1/evenflow/size"
MAX_BODY_BYTES = 256 << 10  # a config.json has a few KiB
TIMEOUT_S = 300.0
NICENESS = 10  # a tenth of what each process that serves beside it gets of a busy core
_PROGRAM = (sys.executable, "-m", "simulator.form")

logger = structlog.get_logger()


def add_sizing(app: FastAPI, dispatcher: Dispatcher) -> None:
    """Answer the form. It is the page's own, so no document of the API names it."""
    running = asyncio.Lock()

    async def size(request: Request) -> Response:
        body = decode_json(await read_body(request, max_bytes=MAX_BODY_BYTES))
        asked = _asked(body, [model.model for model in dispatcher.models()])
        if running.locked():
            raise OverloadedError("another search for a size is running here; try again later")
        told: dict[str, Any] = {}

        async def search() -> None:
            told.update(await _simulated(asked))

        async with running:
            await while_connected(request.receive, search())
        if "error" in told:
            raise InvalidRequestError(told["error"], field=told["field"])
        return JSONResponse(told)

    app.add_api_route(SIZE_PATH, size, methods=["POST"], include_in_schema=False)


def _asked(body: Any, served: list[str]) -> dict[str, Any]:
    """Return what the program reads. Raises InvalidRequestError for another shape of body."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be an object")
    options = {name: told for name, told in body.items() if name != "config"}
    for name, told in options.items():
        if told is not None and (isinstance(told, bool) or not isinstance(told, str | int | float)):
            raise InvalidRequestError(f"{name}: must be a number or a string", field=name)
    config = body.get("config")
    if config is not None and not isinstance(config, dict):
        raise InvalidRequestError("config: must be the object of a config.json", field="config")
    return {"options": options, "config": config, "served": served}


async def _simulated(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the program's answer. Raises DeadlineError, UnavailableError."""
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        *_PROGRAM, str(NICENESS), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            said, complaint = await program.communicate(json.dumps(asked).encode())
    except TimeoutError:
        raise DeadlineError(f"no size was found within {TIMEOUT_S:g} s") from None
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    if program.returncode:
        logger.warning("sizing_failed", complaint=complaint.decode(errors="replace")[-500:])
        raise UnavailableError("the simulator is not installed beside this gateway, or gave up")
    answer: dict[str, Any] = json.loads(said)
    return answer
