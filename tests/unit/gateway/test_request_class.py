"""Which class a request is of."""

from typing import Any

import pytest

from services.gateway.request_class import RequestClass, class_of
from services.gateway.types import GenerationRequest, RequestId
from services.generation.conversation import ChatMessage, ConversationOptions, Tool
from services.generation.prompts import ChatPrompt, TextPrompt
from services.generation.retention import RetentionHint
from services.pacing.types import ServiceLevel

TEXT = TextPrompt("Hi")
TOOLS = ChatPrompt(
    (ChatMessage(role="user", content="Hi"),), ConversationOptions(tools=(Tool(name="f"),))
)
PACE = ServiceLevel(consumption_rate_tps=5.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RequestClass.UNPACED),
        ({"service_level": ServiceLevel(slo_ttft_s=1.0)}, RequestClass.UNPACED),
        ({"service_level": PACE}, RequestClass.PACED),
        ({"service_level": ServiceLevel(slo_tbt_s=0.1)}, RequestClass.PACED),
        ({"session_id": "s", "service_level": PACE}, RequestClass.AGENT),
        ({"retention": RetentionHint(session_id="s")}, RequestClass.AGENT),
        ({"retention": RetentionHint()}, RequestClass.UNPACED),
        ({"prompt": TOOLS}, RequestClass.AGENT),
        ({"priority": 0}, RequestClass.UNPACED),
        ({"priority": -1, "prompt": TOOLS}, RequestClass.AGENT),
        ({"priority": 1, "prompt": TOOLS, "service_level": PACE}, RequestClass.BATCH),
    ],
)
def test_the_first_that_holds_is_its_class(fields: dict[str, Any], expected: RequestClass) -> None:
    asked = {"prompt": TEXT, **fields}

    assert class_of(GenerationRequest(request_id=RequestId("r"), model="m", **asked)) is expected
