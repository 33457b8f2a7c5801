"""Answers of an executor that goes on with them, and what they must have in common."""

from typing import Any

import httpx

from lab.executor_client import ANSWER_TIMEOUT_S, Answer, GatewayStream, resume_of
from lab.stack.executor_process import ExecutorProcess
from lab.stack.metrics import sums_by_label


async def assert_goes_on(gateway: GatewayStream, name: str, answer: Answer, **fields: Any) -> None:
    """Have an answer go on behind its first token, a third of it, its last token but one and its
    last; assert that what comes is the rest of it, in all that is told.
    """
    num_tokens = len(answer.tokens)
    for num_known in sorted({1, num_tokens // 3, num_tokens - 1, num_tokens} - {0}):
        resume = resume_of(answer, num_known)
        rest = await gateway.ask(f"{name} from {num_known}", **fields, resume=resume)
        assert rest.rejected is None, rest.rejected
        assert rest.taken == _renamed(answer, rest)
        assert told(rest) == told(answer)[num_known:], f"{name} from {num_known}"
        assert rest.ending == answer.ending, f"{name} from {num_known}"
        assert rest.prompt is None


def returned_tokens(executor: ExecutorProcess) -> dict[str, float]:
    """Return how many tokens of requests that go on it has `found` and `computed` so far."""
    url = f"http://127.0.0.1:{executor.metrics_port}/metrics"
    exposition = httpx.get(url, timeout=ANSWER_TIMEOUT_S).text
    return sums_by_label(exposition, "evenflow_executor_returned_tokens_total", "result")


def _renamed(answer: Answer, rest: Answer) -> Any:
    assert rest.taken is not None
    expected = type(rest.taken)()
    expected.CopyFrom(answer.taken)
    expected.request_id = rest.taken.request_id
    return expected


def told(answer: Answer) -> list[Any]:
    """Return what is told of each token; a call's id, which is drawn, only by whether it is there,
    and probabilities but for what batches round.
    """
    return [
        (
            token.id,
            token.text,
            token.reasoning,
            [(part.index, bool(part.id), part.name, part.arguments) for part in token.tool_calls],
            token.not_read,
            [
                (one.id, one.token, round(one.logprob, 3))
                for one in (token.logprobs.chosen, *token.logprobs.top)
                if token.HasField("logprobs")
            ],
        )
        for token in answer.tokens
    ]
