"""What the requests of all gateways ask of the engine. No I/O."""

from collections.abc import Collection

from services.executor.serving.streamed_request import StreamedRequest
from services.executor.types import EngineLoad
from services.kit.clock import Clock
from services.kit.recent_rate import RecentRate
from services.reporting.load import ExecutorLoad

HALF_LIFE_S = 10.0  # of time with newcomers


class Newcomers:
    """Counts requests without a token yet, over all gateways.

    Their rate is measured over the time in which there is one, so that a long idle time says
    nothing, and a time without room for any says what it should.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_reqs = 0
        self.num_tokens = 0
        self._since_s = 0.0  # `_computed` is of this moment
        self._computed = RecentRate(HALF_LIFE_S)  # tokens, in time with newcomers
        self.prefill_tps = 0.0  # when the newest was served; 0: none was yet

    def came(self, num_tokens: int) -> None:
        """Take in that a request has come, with so many tokens to be computed."""
        self._pass_time()
        self.num_reqs += 1
        self.num_tokens += num_tokens

    def served(self, num_tokens: int) -> None:
        """Take in that one has its first token."""
        self.left(num_tokens)
        self._computed.came(num_tokens)
        self.prefill_tps = self._computed.per_s

    def left(self, num_tokens: int) -> None:
        """Take in that one has ended without any."""
        self._pass_time()
        self.num_reqs -= 1
        self.num_tokens -= num_tokens

    def _pass_time(self) -> None:
        now_s = self._clock()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self.num_reqs:
            self._computed.passed(passed_s)


def load_of(
    engine: EngineLoad, newcomers: Newcomers, live: Collection[StreamedRequest]
) -> ExecutorLoad:
    """Return the load of an executor; `live`: the requests of all gateways."""
    paced = [one for one in live if one.interval_s > 0]
    deposits_s = [one.num_deposited * one.interval_s for one in paced]
    read_tps = sum(1.0 / one.interval_s for one in paced)
    return ExecutorLoad(
        num_running_reqs=engine.num_running_reqs,
        num_newcomers=newcomers.num_reqs,
        num_newcomer_tokens=newcomers.num_tokens,
        prefill_tps=newcomers.prefill_tps,
        kv_unavailable_frac=engine.kv_cache_usage_frac,
        deposit_s=sum(deposits_s) / len(paced) if paced else 0.0,
        reading_load_frac=min(1.0, read_tps / engine.output_tps) if engine.output_tps else 0.0,
    )
