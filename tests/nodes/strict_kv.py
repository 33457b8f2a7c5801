"""Layer-wise KV as the exactness runs have it: freed and awaited blocks are NaN, links are slow.

And patience, where other work may be on the machine: a node that gets no turn for seconds is not
lost.
"""

import os
from dataclasses import replace
from typing import Any

from services.executor import settings
from services.executor.kv_options import KVOptions
from tests.exact.cases import SLOW_LINK

ALONE = "NODES_ARE_ALONE"  # set: nothing else is on the machine
PATIENCE_S = 30.0  # for the answer to a ping


def be_strict() -> None:
    """Have this process' engine, all of whose ranks get their options from here, be so."""
    if not os.environ.get(ALONE):
        settings.NODE_KEEPALIVE_S = PATIENCE_S
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
