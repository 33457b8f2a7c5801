"""What a pool has room for where every layer is in it."""

from collections import Counter
from dataclasses import replace

from services.placement.blocks import RESIDENT, STATE, num_request_blocks, side_blocks
from services.placement.types import EngineShape

FAR = 1 << 30  # tokens: farther than any window


def pool_tokens(shape: EngineShape, *, request_tokens: int = 0) -> int:
    """Return the tokens that the pool holds with every layer resident.

    Of requests of so many tokens each; 0: of one request.
    """
    if not shape.side_windows:
        return shape.num_blocks // shape.num_groups * shape.block_size
    if not request_tokens:
        num_side = side_blocks(shape.geometry, num_tokens=FAR, num_new_tokens=1)
        return max(0, shape.num_blocks - num_side) // shape.num_groups * shape.block_size
    num_blocks = request_blocks(shape, request_tokens)
    return shape.num_blocks * request_tokens // num_blocks


def stock_shape(shape: EngineShape) -> EngineShape | None:
    """Return the engine as stock vLLM has it, of models with windows beside full attention.

    It groups layers, all groups have as many, and what the last one of a kind lacks takes blocks
    like the others. As many as its rarest kind has; or its commonest, if that is less than 1.5
    times as many (`kv_cache_utils.py` of vLLM 0.32). None where there are states: their pages are
    of other sizes.
    """
    windows = Counter(shape.side_windows)
    if STATE in windows:
        return None
    kinds = (shape.num_groups, *windows.values())
    group = max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)
    padding = [window for window, num in windows.items() for _ in range(-num % group)]
    num_padded = shape.num_groups + -shape.num_groups % group
    return replace(
        shape,
        num_layers=num_padded * shape.layers_per_group,
        side_windows=(*shape.side_windows, *padding),
    )


def request_blocks(shape: EngineShape, num_tokens: int) -> int:
    """Return the blocks of a request that decodes at so many tokens, every layer resident."""
    resident = num_request_blocks(shape.geometry, RESIDENT, num_tokens=num_tokens)
    return resident + side_blocks(shape.geometry, num_tokens=num_tokens, num_new_tokens=1)
