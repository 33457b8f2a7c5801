"""When what happened to live requests, and what those that ended leave behind."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.control.kv import holders_of
from services.control.measures.answer_lengths import AnswerLengths
from services.control.measures.prediction import PlacedRequest
from services.control.measures.tokens_per_step import TokensPerStep
from services.control.requests.request_record import RequestRecord


class RequestLedger:
    """Dates what happens to requests. Their records are the scheduler's, which makes them."""

    def __init__(self, records: Mapping[str, RequestRecord[Any]]) -> None:
        """`records`: of all live requests."""
        self.records = records
        self.last_scheduled: tuple[str, ...] = ()  # of the newest step
        self.last_completion_s: float | None = None
        self.answer_lengths = AnswerLengths()
        self.tokens_per_step = TokensPerStep()

    def step_ended(self, now_s: float) -> list[int]:
        """Record what a step brought: first tokens, and to those that decode how many each.

        Returns the latter.
        """
        brought = []
        for record in self.records.values():
            num_new = record.buffer.num_generated - record.num_counted_tokens
            if not num_new:
                continue
            record.num_counted_tokens += num_new
            if record.first_token_s is None:  # a prompt's, which nothing drafts
                record.first_token_s = now_s
            else:
                known = record.tokens_per_step
                record.tokens_per_step = self.tokens_per_step.added(known, num_new)
                brought.append(num_new)
        return brought

    def tokens_per_step_of(self, record: RequestRecord[Any]) -> float:
        """Return how many tokens a decode step brings a request, >= 1."""
        return record.tokens_per_step or self.tokens_per_step.mean

    def scheduled(self, request_ids: Iterable[str], now_s: float) -> None:
        """Record which requests are part of a step."""
        self.last_scheduled = tuple(request_ids)
        for request_id in self.last_scheduled:
            self.records[request_id].scheduled(now_s)

    def placed(self) -> list[PlacedRequest]:
        """Return the requests of the newest step, their trunks, and where their KV is."""
        records = map(self.records.get, self.last_scheduled)
        kvs = [record.kv for record in records if record is not None and record.kv is not None]
        requests = set(map(id, kvs))
        return [
            PlacedRequest(
                num_tokens=holder.num_tokens if id(holder) in requests else 0,
                num_own_tokens=holder.num_own_tokens,
                offloaded=tuple(holder.offloaded),
                num_buffers=holder.num_buffers,
            )
            for holder in holders_of(kvs)
        ]

    def ended(self, now_s: float, *, num_output_tokens: int | None) -> None:
        """Take in that a request ends; `num_output_tokens`: None if it was aborted."""
        self.last_completion_s = now_s
        if num_output_tokens is not None:
            self.answer_lengths.ended(num_output_tokens)
