"""Why an answer ended."""

from enum import Enum


class FinishReason(Enum):
    """Why a request ended without an error."""

    STOP = "stop"  # the model ended its answer, or a stop string matched
    LENGTH = "length"  # max_tokens or the context length was reached
    CANCELLED = "cancelled"  # its reader or its gateway aborted it or went away
    TOOL_CALLS = "tool_calls"  # the model ended its answer, which calls functions as it chose
