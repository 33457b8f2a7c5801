"""What the scheduler and every rank say of copies."""

from enum import StrEnum

CHUNK_BYTES = 4 << 20  # a copy goes in chunks of about this size, so that others can overtake it


class FailureCause(StrEnum):
    """What went wrong with a copy."""

    FAILED = "failed"  # it ended without moving every byte
    HUNG = "hung"  # it did not end in time, and may still write
    CORRUPT = "corrupt"  # it ended, and the bytes are not those that left
