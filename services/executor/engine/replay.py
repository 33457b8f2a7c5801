"""What vLLM's front half keeps of an answer, brought to where an answer begun elsewhere is.

vLLM looks whether an answer is complete only as it draws a token: of one that is complete already,
but whose ending was lost, it would draw more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from services.executor.engine.collector import Reporting, ending_of, tool_calls_of
from services.executor.engine.logprobs import token_logprobs
from services.executor.prompts.resumption import malformed
from services.executor.types import Delta, RejectedError, Said, Token
from services.generation.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """An answer so far, as vLLM's front half has it."""

    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor
    ending: Delta | None  # of an answer that is complete; None: it goes on
    retold: tuple[Token, ...] = ()  # its last tokens, as they were told


class Replay:
    """Goes through the tokens of one answer again, and tells of them what is asked for."""

    def __init__(self, core_request: Any, tokenizer: Any, reporting: Reporting) -> None:
        """`core_request` in vLLM's form; `reporting` with a parser that has seen nothing."""
        self._request = Request.from_engine_core_request(core_request, None)
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, core_request)
        self._logprobs = LogprobsProcessor.from_new_request(tokenizer, core_request)
        self._reporting = reporting

    def run(
        self, output_ids: Sequence[int], *, max_model_len: int, num_retold: int = 0
    ) -> Replayed:
        """Return where the answer is behind its tokens, the last `num_retold` of which are told
        again. Raises RejectedError if it ended before.

        Takes some 30 microseconds for each token, more where answers are parsed or scored.
        """
        ending, first_told = None, len(output_ids) - num_retold
        retold = []
        for index, id in enumerate(output_ids):
            if ending is not None:
                message = "resume.output_ids: the answer ended before the last of them"
                raise RejectedError(malformed(message, "resume.output_ids"))
            told, ending = self._take(id, max_model_len)
            if index >= first_told:
                retold.append(told)
        return Replayed(
            detokenizer=self._detokenizer,
            logprobs=self._logprobs,
            ending=ending,
            retold=tuple(retold),
        )

    def _take(self, id: int, max_model_len: int) -> tuple[Token, Delta | None]:
        """Take in a token; return what it says, and how the answer ends with it, if it does."""
        request, detokenizer, parser = self._request, self._detokenizer, self._reporting.parser
        request.append_output_token_ids(id)
        is_complete = check_stop(request, max_model_len)
        at_stop_token = request.status == RequestStatus.FINISHED_STOPPED
        stop_string = detokenizer.update([id], at_stop_token)
        is_last = is_complete or stop_string is not None
        text = detokenizer.get_next_output_text(is_last, True)
        said = Said(text) if parser is None else parser.parse(text, [id], is_last=is_last)
        is_read = self._reporting.reads if parser is None else parser.is_read
        told = Token(
            id, said.text, self._scored(id), said.reasoning, said.tool_calls, is_read=is_read
        )
        if not is_last:
            return told, None
        reason = "stop" if stop_string or at_stop_token else "length"
        return told, self._ending(reason, stop_string)

    def _scored(self, id: int) -> TokenLogprobs | None:
        """Return a token's text as it is told beside its probability, which is not known: 0; None
        where it is not told.
        """
        known = self._logprobs.logprobs
        if known is None:
            return None
        place = LogprobsLists(np.array([[id]]), np.array([[0.0]]), np.array([1]), None)
        self._logprobs.update_from_output(EngineCoreOutput("", [id], new_logprobs=place))
        return token_logprobs(id, known[-1], 0)

    def _ending(self, reason: str, stop_string: str | None) -> Delta:
        parser, ending = self._reporting.parser, ending_of(reason, self._reporting)
        return Delta(
            (),
            ending,
            num_reasoning_tokens=parser.num_reasoning_tokens if parser is not None else None,
            num_cached_tokens=self._reporting.num_cached_tokens or 0,
            stop_string=stop_string or "",
            tool_calls=tool_calls_of(ending, self._reporting),
        )
