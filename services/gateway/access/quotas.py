"""How much each API key may have: requests at once, tokens per minute. Per gateway."""

import math
import time
from collections import Counter

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from services.gateway.access.api_keys import ApiKey
from services.gateway.errors import KeyLimitError


class Quotas:
    """Counts what callers use. A request that is refused here has cost nothing.

    A request's tokens are counted when it ends: what runs in the last moment of a minute's
    allowance may exceed it, and the next requests wait for it.
    """

    def __init__(self, *, default_max_live: int) -> None:
        """Keys without a limit of their own may have `default_max_live` requests at a time."""
        self._default_max_live = default_max_live
        self._num_live: Counter[str] = Counter()
        self._windows = FixedWindowRateLimiter(MemoryStorage())

    def enter(self, caller: ApiKey | None, num_requests: int = 1) -> None:
        """Count new requests of `caller`. Raises KeyLimitError, and then counts none."""
        if caller is None:
            return
        most = caller.max_live_requests or self._default_max_live
        if self._num_live[caller.name] + num_requests > most:
            raise KeyLimitError(f"this API key may have {most} requests at a time")
        if caller.tokens_per_minute is not None:
            self._check_tokens(caller.name, caller.tokens_per_minute)
        self._num_live[caller.name] += num_requests

    def leave(self, caller: ApiKey | None, num_tokens: int) -> None:
        """Count a request of `caller` as ended, with its prompt's and its output's tokens."""
        if caller is None:
            return
        self._num_live[caller.name] -= 1
        if not self._num_live[caller.name]:
            del self._num_live[caller.name]
        if caller.tokens_per_minute is not None and num_tokens:
            allowance = RateLimitItemPerMinute(caller.tokens_per_minute)
            self._windows.hit(allowance, caller.name, cost=num_tokens)

    def _check_tokens(self, name: str, tokens_per_minute: int) -> None:
        allowance = RateLimitItemPerMinute(tokens_per_minute)
        if self._windows.test(allowance, name):
            return
        reset_s = self._windows.get_window_stats(allowance, name).reset_time - time.time()
        raise KeyLimitError(
            f"this API key may use {tokens_per_minute} tokens per minute",
            retry_after_s=max(1, math.ceil(reset_s)),
            headers={
                "x-ratelimit-limit-tokens": str(tokens_per_minute),
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": f"{max(0.0, reset_s):.1f}s",
            },
        )
