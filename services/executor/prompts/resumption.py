"""Whether an answer that was begun elsewhere can go on here."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from services.executor.types import RejectCode, RejectedError, Rejection, Resume

DIGEST_BYTES = 8


def prompt_digest(ids: Sequence[int]) -> int:
    """Return what stands for a prompt's token ids, in (0, 2^64)."""
    digest = blake2b(array("i", ids).tobytes(), digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little") or 1


def check_ids(resume: Resume, *, vocabulary_size: int) -> None:
    """Raise `RejectedError` for ids that the vocabulary lacks."""
    if max(resume.output_ids) >= vocabulary_size:
        message = f"resume.output_ids: must be in [0, {vocabulary_size})"
        raise RejectedError(malformed(message, "resume.output_ids"))


def check_count(resume: Resume, max_tokens: int) -> None:
    """Raise `RejectedError` for an answer that has more tokens than it may have here."""
    if len(resume.output_ids) > max_tokens:
        message = f"resume.output_ids: are more than {max_tokens}, all that the answer may have"
        raise RejectedError(malformed(message, "resume.output_ids"))


def check_place(resume: Resume, prompt_ids: Sequence[int], *, max_model_len: int) -> None:
    """Raise `RejectedError` if the answer was to another prompt, or has no room here."""
    if resume.prompt_digest not in (0, prompt_digest(prompt_ids)):
        raise RejectedError(cannot_resume("the prompt is rendered differently here"))
    if len(prompt_ids) + resume.max_tokens > max_model_len:
        raise RejectedError(
            cannot_resume(
                f"the prompt has {len(prompt_ids)} tokens, the answer may have {resume.max_tokens},"
                f" and the context length is {max_model_len}"
            )
        )


def malformed(message: str, field: str) -> Rejection:
    """Return why no executor can let an answer go on."""
    return Rejection(code=RejectCode.INVALID_ARGUMENT, field=field, message=message)


def cannot_resume(why: str) -> Rejection:
    """Return why this executor cannot let an answer go on."""
    message = f"the answer cannot go on here: {why}"
    return Rejection(code=RejectCode.CANNOT_RESUME, field="resume", message=message)
