"""Which tokens of a request are to be kept, of a conversation of which its client names turns."""

from collections.abc import Sequence
from dataclasses import replace

from services.executor.prompts.answer_parser import AnswerParser
from services.executor.prompts.prompt_renderer import PromptRenderer
from services.executor.request_tag import KeptTokens, ToolTurn, with_kept, with_tool_turn
from services.executor.types import PreparedRequest, RejectedError, Submission
from services.generation.conversation import ChatMessage, ToolCall
from services.generation.prompts import ChatPrompt, TokenizeOptions
from services.generation.retention import RetentionHint

THOUGHT = "evenflow-thought"  # looked for in what a template writes


class KeptParts:
    """Finds where marked turns end, and whether a template writes thoughts into later turns."""

    def __init__(self, renderer: PromptRenderer, *, keeps_tool_turns: bool) -> None:
        """`keeps_tool_turns`: of answers that may end with a tool call something is kept without a
        hint.
        """
        self._renderer, self._keeps_tool_turns = renderer, keeps_tool_turns
        self._keeps_thoughts: dict[bool, bool] = {}  # by whether the turn ended in a call

    async def ask(self, submission: Submission, answers: Sequence[PreparedRequest]) -> None:
        """Have the scheduler know what is to be kept of answers to one prompt."""
        hint = submission.retention or RetentionHint()
        may_call = self._keeps_tool_turns and _has_tools(submission.prompt)
        if not (hint.marks or may_call):
            return
        prompt_ids = answers[0].core_request.prompt_token_ids
        whole = 0
        if await self._forgets_thoughts(submission.prompt, answers[0].parser):
            whole = len(prompt_ids)  # no later prompt goes on behind them
        if may_call:
            turn = ToolTurn(hint.account, hint.session_id, whole)
            for answer in answers:
                sampling = answer.core_request.sampling_params
                sampling.extra_args = with_tool_turn(sampling.extra_args, turn)
        if not hint.marks:
            return
        spans = [
            (await self._end(submission, prompt_ids, mark.num_messages) or whole, mark.retention_s)
            for mark in hint.marks
        ]
        kept = KeptTokens(hint.account, hint.session_id, spans)
        for answer in answers:
            sampling = answer.core_request.sampling_params
            sampling.extra_args = with_kept(sampling.extra_args, kept)

    async def _end(
        self, submission: Submission, prompt_ids: Sequence[int], num_messages: int
    ) -> int:
        """Return where turns end in the prompt; 0: with all of it.

        A template may not write so few turns alone: then with one more.
        """
        prompt = submission.prompt
        if not isinstance(prompt, ChatPrompt) or not num_messages:
            return 0
        last = min(num_messages + 1, len(prompt.messages) - 1)
        for number in range(num_messages, last + 1):
            try:
                ids = await self._ids(prompt, number, submission.fair_key)
            except RejectedError:
                continue
            return _num_alike(prompt_ids, ids)
        return 0

    async def _ids(self, prompt: ChatPrompt, number: int, fair_key: str) -> Sequence[int]:
        options = replace(
            prompt.options, omits_generation_prompt=True, continues_final_message=False
        )
        how = TokenizeOptions(omits_generation_prompt=True, fair_key=fair_key)
        return await self._renderer.tokenize(ChatPrompt(prompt.messages[:number], options), how)

    async def _forgets_thoughts(self, prompt: object, parser: AnswerParser | None) -> bool:
        """Return whether an answer begins with thoughts that the turn after it does not have; of
        one that may be a call, if it is one.
        """
        if parser is None or parser.num_reasoning_tokens is None:
            return False
        calls = _has_tools(prompt)
        if calls not in self._keeps_thoughts:
            self._keeps_thoughts[calls] = await self._writes_thoughts(calls=calls)
        return not self._keeps_thoughts[calls]

    async def _writes_thoughts(self, *, calls: bool) -> bool:
        called = (ToolCall(id="call-1", name="look", arguments="{}"),) if calls else ()
        told = "" if calls else "b"
        answer = ChatMessage(role="assistant", content=told, reasoning=THOUGHT, tool_calls=called)
        after = (
            ChatMessage(role="tool", content="c", tool_call_id="call-1")
            if calls
            else ChatMessage(role="user", content="c")
        )
        turns = ChatPrompt((ChatMessage(role="user", content="a"), answer, after))
        try:
            ids = await self._renderer.tokenize(turns, TokenizeOptions())
            return THOUGHT in await self._renderer.detokenize(ids, fair_key="")
        except RejectedError:
            return False


def _has_tools(prompt: object) -> bool:
    return isinstance(prompt, ChatPrompt) and bool(prompt.options.tools)


def _num_alike(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many leading ids are the same."""
    length = min(len(some), len(others))
    return next((n for n in range(length) if some[n] != others[n]), length)
