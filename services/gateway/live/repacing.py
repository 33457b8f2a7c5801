"""Other promises to streams that run: from the next token on, here and in the scheduler."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.gateway.checks import check_service_level
from services.gateway.errors import UnknownRequestError
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.types import Delivery, RequestId
from services.pacing.types import ServiceLevel


def repace(
    dispatcher: Dispatcher,
    request_id: RequestId,
    stated: Mapping[str, Any],
    names: Mapping[str, str],
) -> ServiceLevel:
    """Have the caller's running streams of that name keep what is stated: numbers by the names of
    a `ServiceLevel`; None: no bound. Returns what the first of them is promised now.

    `names` are the client's, for errors. Raises UnknownRequestError, InvalidRequestError for what
    is out of range or may not be asked for; nothing has changed then.
    """
    streams = [
        live
        for live in dispatcher.named(request_id)
        if live.generation.request.delivery is Delivery.STREAMED
        and live.generation.num_prompt_tokens  # an executor has taken it
    ]
    if not streams:
        raise UnknownRequestError(f'no running stream has the id "{request_id}"')
    requests = [live.generation.request for live in streams]
    levels = [replace(request.service_level, **stated) for request in requests]
    for level in levels:
        check_service_level(level, names)
    dispatcher.check_terms(
        [
            replace(request, service_level=level)
            for request, level in zip(requests, levels, strict=True)
        ]
    )
    for live, level in zip(streams, levels, strict=True):
        live.generation.repace(level)
        if live.route is not None:
            live.route.link.pace(live.route.ref.request_id, level)
    return levels[0]
