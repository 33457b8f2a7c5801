"""What a pool has room for where every layer is in it."""

from services.placement.blocks import RESIDENT, num_request_blocks, side_blocks
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


def request_blocks(shape: EngineShape, num_tokens: int) -> int:
    """Return the blocks of a request that decodes at so many tokens, every layer resident."""
    resident = num_request_blocks(shape.geometry, RESIDENT, num_tokens=num_tokens)
    return resident + side_blocks(shape.geometry, num_tokens=num_tokens, num_new_tokens=1)
