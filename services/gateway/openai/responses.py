"""The response shapes of the OpenAI API: whole answers, and chunks cheap enough for every token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from json.encoder import encode_basestring
from typing import Any

import msgspec

from services.gateway.openai.errors import body_of
from services.gateway.openai.logprobs import chat_logprobs, completion_logprobs
from services.gateway.openai.messages import delta, is_plain, message, says_something
from services.gateway.openai.schemas import Extension, Model, Pace, Retention, Usage
from services.gateway.types import Continued, Finish, RequestId, ServedModel, Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt, TokenLogprobs
from services.generation.retention import Retained, least_of
from services.pacing.types import ServiceLevel

DONE_EVENT = b"data: [DONE]\n\n"
_END_OF_EVENT = "\n\n"
MAX_LIST_STEP = 32  # entries that are encoded in one step
# Legal inside a JSON string, but taken for line ends by some readers of event streams.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class AnswerKind(Enum):
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer, and the whole answer, begin with."""

    kind: AnswerKind
    request_id: RequestId
    model: str
    created_s: int  # since 1970
    answers_per_prompt: int = 1  # answer k is one to prompt k // answers_per_prompt
    is_prompt_only: bool = False  # what is generated is not told
    has_token_ids: bool = False  # of what is generated, in every choice
    names_tokens_by_id: bool = False  # where their probabilities are told
    uses_extension: bool = False  # and is told what it says beside the answer

    @property
    def is_chat(self) -> bool:
        return self.kind is AnswerKind.CHAT

    @property
    def answer_id(self) -> str:
        prefix = "chatcmpl" if self.kind is AnswerKind.CHAT else "cmpl"
        return f"{prefix}-{self.request_id}"


_encode = msgspec.json.Encoder().encode  # a million ids of a prompt take it 9 ms, json 90


def encode_json(value: Any) -> str:
    """Encode compactly, in UTF-8 rather than escapes, on one line by any definition of a line."""
    text = _encode(value).decode()
    return text if text.isascii() else text.translate(_LINE_ENDS)


def encode_large_json(value: Any) -> str:
    """Encode like `encode_json`, in many small steps, so that other threads have their turns."""
    if isinstance(value, dict):
        members = (f"{encode_json(key)}:{encode_large_json(v)}" for key, v in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list | tuple) and len(value) > MAX_LIST_STEP:
        return f"[{','.join(map(encode_large_json, value))}]"
    return encode_json(value)


def encode_text(text: str) -> str:
    """Encode a string as `encode_json` does, but faster: each token is one."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(_LINE_ENDS)


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return f"data: {encode_json(value)}{_END_OF_EVENT}".encode()


def usage(finishes: Sequence[Finish], answers_per_prompt: int) -> Usage:
    """Return the token counts of all answers, in order; each prompt counts once."""
    of_prompts = finishes[::answers_per_prompt]
    num_prompt_tokens = sum(f.num_prompt_tokens for f in of_prompts)
    num_output_tokens = sum(f.num_output_tokens for f in finishes)
    counts = _counts(num_prompt_tokens, num_output_tokens)
    counts["prompt_tokens_details"] = {
        "cached_tokens": sum(f.num_cached_tokens for f in of_prompts)
    }
    thoughts = [n for f in finishes if (n := f.num_reasoning_tokens) is not None]
    if thoughts:
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(thoughts)}
    return counts


def _counts(num_prompt_tokens: int, num_output_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def told_extension(finishes: Sequence[Finish], *, is_asked: bool) -> dict[str, Extension]:
    """Return the member that tells how often answers moved, and what is kept of all of them; none
    if the client did not ask, or there is nothing to tell.
    """
    if not is_asked:
        return {}
    told: Extension = {}
    if num_moves := sum(finish.moves for finish in finishes):
        is_valid = any(finish.continued is Continued.VALID for finish in finishes)
        told = {"moves": num_moves, "continued": "valid" if is_valid else "identical"}
    if (retained := least_of(finish.retained for finish in finishes)) is not None:
        told["retention"] = retention_entry(retained)
    return {"evenflow": told} if told else {}


def retention_entry(retained: Retained) -> Retention:
    """Return what is kept of a request's KV, as clients see it."""
    return {
        "status": retained.status.value,
        "reason": retained.reason.value if retained.reason else None,
        "tokens": retained.num_tokens,
        "retention_s": retained.retention_s,
    }


def chunk_base(head: AnswerHead) -> dict[str, Any]:
    """Return what every chunk of an answer begins with."""
    return {
        "id": head.answer_id,
        "object": "chat.completion.chunk" if head.is_chat else "text_completion",
        "created": head.created_s,
        "model": head.model,
    }


def usage_event(head: AnswerHead, finishes: Sequence[Finish]) -> bytes:
    """Return the event that tells the token counts of a stream."""
    counts = usage(finishes, head.answers_per_prompt)
    return event(chunk_base(head) | {"choices": [], "usage": counts})


class ChunkWriter:
    """Formats one streamed answer. What does not change from token to token is made once."""

    def __init__(
        self,
        head: AnswerHead,
        index: int,
        *,
        includes_usage: bool,
        counted_from: int | None = None,
    ) -> None:
        """`index` is the answer's number among those to one HTTP request, from 0. With the number
        of its prompt's tokens in `counted_from`, every chunk has its token counts so far.
        """
        self._is_chat = head.is_chat
        self._is_prompt_only = head.is_prompt_only
        self._uses_extension = head.uses_extension
        self._has_token_ids = head.has_token_ids
        self._index = index
        self._includes_usage = includes_usage
        self._counted_from = counted_from
        self._is_full = head.has_token_ids or counted_from is not None
        self._prompt_ids: Sequence[int] = ()  # to be told with the role
        self._num_tokens = 0  # of the answer, up to the chunk that is made
        self._head = chunk_base(head)
        self._names_by_id = head.names_tokens_by_id
        self._is_begun = not self._is_chat  # only a chat tells a role
        self._num_characters = 0  # of the tokens whose probabilities were written
        # The text goes between the two halves of a chunk made with a placeholder.
        before, _, after = encode_json(self._chunk("\0")).partition(encode_json("\0"))
        self._before_text = f"data: {before}"
        self._after_text = f"{after}{_END_OF_EVENT}"

    def beginning(self) -> bytes:
        """Return nothing: the role comes with the first token."""
        return b""

    def prompt(self, prompt: EchoedPrompt) -> bytes:
        """Return the event that gives the prompt back; it comes before all others. A conversation's
        ids come with the role.
        """
        if self._is_chat:
            self._prompt_ids = prompt.token_ids
            return b""
        choice = self._choice(prompt.text, self._logprobs(prompt.logprobs), None)
        if prompt.token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return event(self._with_choices([choice]))

    def tokens(self, tokens: Sequence[Token], *, as_one: bool = False) -> bytes:
        """Return an event per token that says something, or has probabilities or an id to be told,
        or one for all of them; the first ones follow the chunk with the role.
        """
        if self._is_prompt_only:
            return b""
        if self._is_full:
            return self._full_events(tokens, as_one=as_one)
        texts = []
        for token in tokens:
            if token.logprobs is not None or not is_plain(token):
                return self._full_events(tokens, as_one=as_one)
            if token.text:
                texts.append(token.text)
        if as_one and texts:
            texts = ["".join(texts)]
        events = [f"{self._before_text}{encode_text(text)}{self._after_text}" for text in texts]
        if not events:
            return b""
        told = "".join(events).encode()
        return told if self._is_begun else self._begin() + told

    def _full_events(self, tokens: Sequence[Token], *, as_one: bool) -> bytes:
        """Return the events of tokens of which some have more than text."""
        all_count = self._has_token_ids or tokens[0].logprobs is not None
        told = tokens if all_count else [token for token in tokens if says_something(token)]
        if not told:
            return b""
        groups = [told] if as_one else [[token] for token in told]
        return self._begin() + b"".join(map(self._full, groups))

    def ending(self, finish: Finish) -> bytes:
        """Return the events up to the finish reason."""
        if self._is_prompt_only:
            finish = _of_no_tokens(finish)
        choice = self._choice({} if self._is_chat else "", None, finish.reason.value)
        begun = self._begin()
        self._num_tokens = finish.num_output_tokens
        more = told_extension([finish], is_asked=self._uses_extension)
        return begun + event(self._with_choices([choice]) | more)

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        choice = self._choice({"role": "assistant", "content": ""}, None, None)
        chunk = self._with_choices([choice])
        if self._prompt_ids:
            chunk["prompt_token_ids"], self._prompt_ids = self._prompt_ids, ()
        return event(chunk)

    def _full(self, tokens: Sequence[Token]) -> bytes:
        """Return the event of tokens with all that they have."""
        self._num_tokens = tokens[-1].index + 1
        logprobs = self._logprobs([t.logprobs for t in tokens if t.logprobs])
        if all(map(is_plain, tokens)):
            return event(self._chunk("".join(token.text for token in tokens), logprobs, tokens))
        return event(self._with_choices([self._choice(delta(tokens), logprobs, None, tokens)]))

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        if self._is_chat:
            return chat_logprobs(logprobs, by_id=self._names_by_id)
        written = completion_logprobs(
            logprobs, first_offset=self._num_characters, by_id=self._names_by_id
        )
        self._num_characters += sum(len(one.chosen.token) for one in logprobs)
        return written

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None = None, tokens: Sequence[Token] = ()
    ) -> dict[str, Any]:
        content = {"content": text} if self._is_chat else text
        return self._with_choices([self._choice(content, logprobs, None, tokens)])

    def _choice(
        self,
        content: dict[str, Any] | str,
        logprobs: dict[str, Any] | None,
        reason: str | None,
        tokens: Sequence[Token] = (),
    ) -> dict[str, Any]:
        name = "delta" if self._is_chat else "text"
        choice: dict[str, Any] = {
            "index": self._index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if self._has_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return choice

    def _with_choices(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        if self._counted_from is not None:
            return chunk | {"usage": _counts(self._counted_from, self._num_tokens)}
        return chunk | {"usage": None} if self._includes_usage else chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer as a whole."""

    tokens: Sequence[Token]
    finish: Finish
    prompt: EchoedPrompt | None = None  # given back before the answer


def whole_answers(head: AnswerHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the body of a response that is not streamed. One conversation has one prompt, whose
    ids it tells; other choices have their prompts'.
    """
    prompt, finishes = answers[0].prompt, [answer.finish for answer in answers]
    ids = {"prompt_token_ids": prompt.token_ids} if head.is_chat and prompt is not None else {}
    return {
        "id": head.answer_id,
        "object": "chat.completion" if head.is_chat else "text_completion",
        "created": head.created_s,
        "model": head.model,
        "choices": [_whole_choice(head, k, answer) for k, answer in enumerate(answers)],
        "usage": usage(finishes, head.answers_per_prompt),
        **ids,
        **told_extension(finishes, is_asked=head.uses_extension),
    }


def _whole_choice(head: AnswerHead, index: int, answer: Answer) -> dict[str, Any]:
    text = "".join(token.text for token in answer.tokens)
    logprobs = [token.logprobs for token in answer.tokens if token.logprobs is not None]
    if answer.prompt is not None:
        text = answer.prompt.text + text
        logprobs = [*answer.prompt.logprobs, *logprobs]
    choice: dict[str, Any] = {"index": index}
    by_id = head.names_tokens_by_id
    if head.is_chat:
        choice["message"] = message(answer.tokens)
        written = chat_logprobs(logprobs, by_id=by_id) if logprobs else None
    else:
        choice["text"] = text
        written = completion_logprobs(logprobs, by_id=by_id) if logprobs else None
    choice |= {"logprobs": written, "finish_reason": answer.finish.reason.value}
    if head.has_token_ids:
        choice["token_ids"] = [token.id for token in answer.tokens]
    if not head.is_chat and answer.prompt is not None and answer.prompt.token_ids:
        choice["prompt_token_ids"] = answer.prompt.token_ids
    return choice


def _of_no_tokens(finish: Finish) -> Finish:
    """Return the ending of an answer that is the prompt alone."""
    return replace(finish, reason=FinishReason.LENGTH, num_output_tokens=0)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Answers as chat completions, or as plain ones."""

    head: AnswerHead
    includes_usage: bool = False  # in a stream, before it ends
    counts_each_event: bool = False  # an answer's own tokens so far, in each of its events
    limit_name: str = "max_tokens"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        if self.head.is_prompt_only:
            answers = [
                replace(answer, tokens=(), finish=_of_no_tokens(answer.finish))
                for answer in answers
            ]
        return whole_answers(self.head, answers)

    def writer(self, index: int, num_prompt_tokens: int) -> ChunkWriter:
        return ChunkWriter(
            self.head,
            index,
            includes_usage=self.includes_usage,
            counted_from=num_prompt_tokens if self.counts_each_event else None,
        )

    def last_events(self, finishes: Sequence[Finish]) -> bytes:
        if self.head.is_prompt_only:
            finishes = [_of_no_tokens(finish) for finish in finishes]
        told = usage_event(self.head, finishes) if self.includes_usage else b""
        return told + DONE_EVENT

    def failure(self, error: Exception) -> bytes:
        return event(body_of(error))


def pace_entry(request_id: str, level: ServiceLevel) -> Pace:
    """Return what a stream is promised, as clients see it."""
    return {
        "id": request_id,
        "slo_tpot_ms": level.slo_tpot_s and 1e3 * level.slo_tpot_s,
        "slo_tbt_ms": level.slo_tbt_s and 1e3 * level.slo_tbt_s,
        "consumption_rate_tps": level.consumption_rate_tps,
    }


def model_entry(model: ServedModel, created_s: int) -> Model:
    return {
        "id": model.model,
        "object": "model",
        "created": created_s,
        "owned_by": "evenflow",
        "root": model.root or model.model,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
    }
