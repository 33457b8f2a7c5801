"""A fake executor whose k-th token is a function of prompt, seed and k: any splice shows."""

import asyncio
from hashlib import blake2b

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import FINGERPRINT, FakeExecutor, Script, open_gate

NUM_TOKENS = 24  # of an answer whose request does not say
WORDS = ["é", "a", " lot", "of", "\n", "words", "."]


def token_at(submit: pb.Submit, k: int) -> pb.Token:
    """Return the k-th token of an answer: a thought, half a character, text, or part of a call."""
    said = submit.text or str(submit.token_ids.ids) or submit.chat.messages[-1].content
    drawn = blake2b(f"{said}|{submit.sampling.seed}|{k}".encode()).digest()
    word = WORDS[drawn[0] % len(WORDS)]
    token = pb.Token(id=int.from_bytes(drawn[1:4], "big"))
    if submit.chat.options.tools and k >= NUM_TOKENS // 3:
        part = gen.ToolCallPart(arguments=f"{k}")
        if k % 8 == 0:
            part.id, part.name = f"call-{k}", "look"
        part.index = k // 8 - 1
        token.tool_calls.append(part)
    elif submit.HasField("chat") and k < 3:
        token.reasoning = word
    else:
        token.text = "" if drawn[4] % 5 == 0 else word
    return token


class Machine(FakeExecutor):
    """Stops midway in each answer while `goes_on` is not set."""

    def __init__(self, number: int = 0, **facts: str) -> None:
        facts = {"fingerprint": FINGERPRINT, "numerics": "cpu"} | facts
        super().__init__(executor_id=f"executor-{number}", **facts)
        self.goes_on = open_gate()
        self.takes = open_gate()
        self.interval_s = 0.0  # between two tokens
        self.dying: asyncio.Task[None] | None = None
        self.wrong: list[pb.Submit] = []  # those that go on with tokens of another answer
        self.script_for = self._script_for

    def _script_for(self, submit: pb.Submit) -> Script:
        num_tokens = submit.sampling.max_tokens or NUM_TOKENS
        tokens = [token_at(submit, k) for k in range(num_tokens)]
        ids = list(submit.resume.output_ids)
        if ids != [token.id for token in tokens[: len(ids)]]:
            self.wrong.append(submit)
        return Script(
            texts=tokens,
            interval_s=self.interval_s,
            midway=self.goes_on,
            accepting=self.takes,
            num_reasoning_tokens=3,
            finish_reason=gen.FINISH_REASON_LENGTH,
        )

    @property
    def resumed(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if submit.HasField("resume")]

    @property
    def begun(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if not submit.HasField("resume")]
