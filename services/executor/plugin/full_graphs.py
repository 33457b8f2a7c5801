"""Full CUDA graphs in steps whose layers need no hook, piecewise ones in all others.

A full graph replays all layers without the hooks between them. Those are needed where layers wait
for loads, or write staging that is saved; so while nothing is offloaded, steps are stock vLLM's.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode


def forbid_full_graphs_v1(dispatcher: Any, is_forbidden: Callable[[], bool]) -> None:
    """Have the first model runner's dispatcher find no full graph while `is_forbidden`."""
    dispatch = dispatcher.dispatch

    def dispatch_allowed(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        if is_forbidden():
            invalid_modes = {*(invalid_modes or ()), CUDAGraphMode.FULL}
        return dispatch(*args, invalid_modes=invalid_modes, **kwargs)

    dispatcher.dispatch = dispatch_allowed


def forbid_full_graphs_v2(manager: Any, is_forbidden: Callable[[], bool]) -> None:
    """Have the second model runner's graphs find no full graph while `is_forbidden`.

    Each full graph is for batches whose queries have one length, or one at most: to a batch of
    which neither is said, none fits.
    """
    dispatch = manager.dispatch

    def dispatch_allowed(
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        *args: Any,
        max_query_len: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if is_forbidden():
            uniform_token_count = max_query_len = None
        return dispatch(
            num_reqs, num_tokens, uniform_token_count, *args, max_query_len=max_query_len, **kwargs
        )

    manager.dispatch = dispatch_allowed
