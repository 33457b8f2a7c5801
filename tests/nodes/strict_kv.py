"""Layer-wise KV as the exactness runs have it: freed and awaited blocks are NaN, links are slow."""

from dataclasses import replace
from typing import Any

from services.executor.kv_options import KVOptions
from tests.exact.cases import SLOW_LINK


def be_strict() -> None:
    """Have this process' engine, all of whose ranks get their options from here, be so."""
    to_args = KVOptions.engine_args

    def strict_args(options: KVOptions) -> dict[str, Any]:
        strict = replace(
            options,
            poison=True,
            integrity_guard=SLOW_LINK.integrity_guard,
            copy_latency_s=SLOW_LINK.copy_latency_s,
            h2d_bytes_per_s=SLOW_LINK.h2d_bytes_per_s,
            d2h_bytes_per_s=SLOW_LINK.d2h_bytes_per_s,
        )
        return to_args(strict)

    KVOptions.engine_args = strict_args  # type: ignore[method-assign]
