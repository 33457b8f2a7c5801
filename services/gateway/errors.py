"""The gateway's own reasons for refusing or ending a request."""

from collections.abc import Mapping

from services.kit.errors import (
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)


class UnknownModelError(NotFoundError):
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str = "", *, message: str = "") -> None:
        super().__init__(message or f'the model "{model}" does not exist')
        self.field = "model"


class UnknownRequestError(NotFoundError):
    reason = "UNKNOWN_REQUEST"


class UnknownSessionError(NotFoundError):
    """Nothing is kept for a session of that name, or none is the caller's."""

    reason = "UNKNOWN_SESSION"

    def __init__(self, session_id: str) -> None:
        super().__init__(f'nothing is kept for a session "{session_id}" of yours')


class StreamGoneError(NotFoundError):
    """A stream that could be taken up again cannot be any more."""

    reason = "STREAM_GONE"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f'the stream "{request_id}" is not kept any more: send its request again, over chat, '
            "completions and gRPC with the tokens that you have in evenflow.resume"
        )


class SupersededError(ConflictError):
    """The rest of a stream is another reader's."""

    reason = "SUPERSEDED"

    def __init__(self) -> None:
        super().__init__("another reader has taken the stream up")


class DuplicateRequestError(ConflictError):
    """A live request has the same id; ids are what `Cancel` takes, so they are unique."""

    reason = "DUPLICATE_REQUEST"

    def __init__(self, request_id: str) -> None:
        super().__init__(f'a live request has the id "{request_id}"')


class CancelledRequestError(ConflictError):
    """The request was cancelled by its id."""

    reason = "CANCELLED"


class ReaderStoppedError(DeadlineError):
    """The reader has taken nothing for too long; its request is aborted."""

    reason = "READER_TIMEOUT"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves nothing of the context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(
        self, message: str, *, field: str = "", num_tokens: int = 0, max_model_len: int = 0
    ) -> None:
        """`num_tokens` are the prompt's, 0 if they were not counted; `max_model_len` is the
        context's length, 0 if it is not known.
        """
        super().__init__(message, field=field)
        self.num_tokens, self.max_model_len = num_tokens, max_model_len


class BodyTooLargeError(InvalidRequestError):
    reason = "REQUEST_TOO_LARGE"


class UnsupportedBodyError(InvalidRequestError):
    """The body is written in a way that is not read, or not called what it is."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


class HostNotAllowedError(InvalidRequestError):
    """The gateway was called by a name that is not among its own."""

    reason = "HOST_NOT_ALLOWED"

    def __init__(self) -> None:
        super().__init__(
            "this gateway may not be called by the name in the host header; "
            "EVENFLOW_GATEWAY_ALLOWED_HOSTS has the names by which it may"
        )


class AdminKeyNeededError(InvalidRequestError):
    """The caller's API key may not see what others do."""

    reason = "ADMIN_KEY_NEEDED"

    def __init__(self) -> None:
        super().__init__("this API key is not an admin's: its entry needs `admin = true`")


class TooManyRequestsError(OverloadedError):
    """The gateway has as many live requests as it may have, or would."""

    reason = "TOO_MANY_REQUESTS"

    def __init__(self, *, limit: int, num_free: int) -> None:
        """`limit` live requests are allowed, `num_free` >= 0 more would be taken now."""
        super().__init__("too many live requests; try again later")
        self.limit = limit
        self.num_free = num_free


class KeyLimitError(OverloadedError):
    """The caller's API key has used up what it may have; others are served."""

    reason = "RATE_LIMIT_EXCEEDED"

    def __init__(
        self, message: str, *, retry_after_s: int = 1, headers: Mapping[str, str] | None = None
    ) -> None:
        """`headers` say how much of the limit is left, and until when."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})


class LinkBrokenError(UnavailableError):
    """The stream to an executor ended or broke its rules; its requests are lost."""

    reason = "EXECUTOR_LOST"


class LinkStalledError(LinkBrokenError):
    """An executor's stream is silent though a message was due."""


class EngineStalledError(LinkStalledError):
    """An executor's engine makes no step though readers wait."""


class LeavingError(UnavailableError):
    """The executor is shutting down; its requests go on elsewhere."""

    reason = "EXECUTOR_LEAVING"


class CannotResumeError(UnavailableError):
    """An answer that was begun elsewhere cannot go on at this executor; another may have it."""

    reason = "CANNOT_RESUME"


class EngineFailedError(UnavailableError):
    """The engine gave up on a request; another one may succeed."""

    reason = "ENGINE_FAILED"


class FormsBusyError(UnavailableError):
    """The executor did not get to compile the form of the answer in time; others would not."""

    reason = "FORMS_BUSY"


class GenerationFailedError(ServiceError):
    """The engine gave up on a request, and would again."""

    reason = "GENERATION_FAILED"
