"""Which kind of work a request is, by what it says of itself: for metrics, and for the account of
where KV is. Pure; nothing is decided by it.
"""

from enum import Enum

from services.gateway.types import GenerationRequest
from services.generation.prompts import ChatPrompt
from services.pacing.deposit import release_interval_s


class RequestClass(Enum):
    """The first of these that holds."""

    __hash__ = object.__hash__  # as a `Cause`'s

    BATCH = "batch"  # less urgent than requests that state no priority
    AGENT = "agent"  # names a session, or has tools
    PACED = "paced"  # its answer is read at a pace
    UNPACED = "unpaced"


def class_of(request: GenerationRequest) -> RequestClass:
    """Return a request's class. Its priority may be its key's default; lower is more urgent."""
    if (request.priority or 0) > 0:
        return RequestClass.BATCH
    has_tools = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.options.tools)
    if request.session_name or has_tools:
        return RequestClass.AGENT
    return RequestClass.PACED if release_interval_s(request.service_level) else RequestClass.UNPACED
