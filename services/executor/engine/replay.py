"""What vLLM's front half keeps of an answer, brought to where an answer begun elsewhere is.

vLLM looks whether an answer is complete only as it draws a token: of one that is complete already,
but whose ending was lost, it would draw more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.request import Request, RequestStatus

from services.executor.engine.collector import Reporting, ending_of
from services.executor.prompts.resumption import malformed
from services.executor.types import Delta, RejectedError

NUM_CONTEXT_TOKENS = 4  # that vLLM looks back at for bytes of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """An answer so far, as vLLM's front half has it."""

    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor
    ending: Delta | None  # of an answer that is complete; None: it goes on


class Replay:
    """Goes through the tokens of one answer again, and tells nothing of them."""

    def __init__(self, core_request: Any, tokenizer: Any, reporting: Reporting) -> None:
        """`core_request` in vLLM's form; `reporting` with a parser that has seen nothing."""
        self._request = Request.from_engine_core_request(core_request, None)
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, core_request)
        self._logprobs = LogprobsProcessor.from_new_request(tokenizer, core_request)
        self._reporting = reporting

    def run(self, output_ids: Sequence[int], *, max_model_len: int) -> Replayed:
        """Return where the answer is behind its tokens. Raises RejectedError if it ended before.

        Takes some 30 microseconds for each token, more where answers are parsed.
        """
        ending = None
        for id in output_ids:
            if ending is not None:
                message = "resume.output_ids: the answer ended before the last of them"
                raise RejectedError(malformed(message, "resume.output_ids"))
            ending = self._take(id, max_model_len)
        if (known := self._logprobs.logprobs) is not None:
            known += [{id: None} for id in output_ids[-NUM_CONTEXT_TOKENS:]]
        return Replayed(detokenizer=self._detokenizer, logprobs=self._logprobs, ending=ending)

    def _take(self, id: int, max_model_len: int) -> Delta | None:
        """Take in a token; return how the answer ends with it, if it does."""
        request, detokenizer, parser = self._request, self._detokenizer, self._reporting.parser
        request.append_output_token_ids(id)
        is_complete = check_stop(request, max_model_len)
        at_stop_token = request.status == RequestStatus.FINISHED_STOPPED
        stop_string = detokenizer.update([id], at_stop_token)
        is_last = is_complete or stop_string is not None
        text = detokenizer.get_next_output_text(is_last, True)
        if parser is not None:
            parser.parse(text, [id], is_last=is_last)
        if not is_last:
            return None
        return self._ending("stop" if stop_string or at_stop_token else "length", stop_string)

    def _ending(self, reason: str, stop_string: str | None) -> Delta:
        parser = self._reporting.parser
        return Delta(
            (),
            ending_of(reason, self._reporting),
            num_reasoning_tokens=parser.num_reasoning_tokens if parser is not None else None,
            num_cached_tokens=self._reporting.num_cached_tokens or 0,
            stop_string=stop_string or "",
        )
