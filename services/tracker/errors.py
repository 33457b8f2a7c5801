"""What the tracker refuses, and why."""

from services.kit.errors import ConflictError, NotFoundError, UnavailableError


class LeaseExpiredError(NotFoundError):
    """The executor holds no lease: register again."""

    reason = "LEASE_EXPIRED"


class StaleEpochError(ConflictError):
    """A newer process of the same executor owns the lease."""

    reason = "STALE_EPOCH"


class StoreUnavailableError(UnavailableError):
    """Redis does not answer; every call may be repeated."""

    reason = "STORE_UNAVAILABLE"
