"""An answer goes on behind its own prompt alone, where there is room for all of it."""

import pytest

from services.executor.prompts.resumption import check_ids, check_place, prompt_digest
from services.executor.types import RejectCode, RejectedError, Resume

PROMPT = [5, 6, 7]


def make_resume(**overrides: object) -> Resume:
    fields: dict[str, object] = {
        "output_ids": (1, 2),
        "max_tokens": 5,
        "num_delivered_tokens": 0,
        "last_due_age_s": 0.0,
        "arrived_age_s": 0.0,
        "num_cached_tokens": 0,
        "prompt_digest": prompt_digest(PROMPT),
    }
    return Resume(**fields | overrides)  # type: ignore[arg-type]


def code_of(resume: Resume, *, prompt: list[int] = PROMPT, max_model_len: int = 8) -> str:
    """Return why an answer cannot go on; "" if it can."""
    try:
        check_ids(resume, vocabulary_size=10)
        check_place(resume, prompt, max_model_len=max_model_len)
    except RejectedError as error:
        return error.rejection.code.value
    return ""


def test_a_digest_tells_prompts_apart_and_is_never_nothing() -> None:
    prompts = [[5], [5, 5], [6, 5], [5, 6], [5 + 2**16], PROMPT]

    assert len({prompt_digest(prompt) for prompt in prompts}) == len(prompts)
    assert all(0 < prompt_digest(prompt) < 2**64 for prompt in prompts)
    assert prompt_digest(PROMPT) == prompt_digest(tuple(PROMPT)) == 4_842_055_968_956_316_786


def test_it_goes_on_behind_its_own_prompt() -> None:
    assert code_of(make_resume()) == ""
    assert code_of(make_resume(), prompt=[5, 6, 8]) == RejectCode.CANNOT_RESUME.value
    assert code_of(make_resume(prompt_digest=0), prompt=[5, 6, 8]) == ""


def test_it_goes_on_where_there_is_room_for_all_of_it() -> None:
    assert code_of(make_resume(max_tokens=5)) == ""
    assert code_of(make_resume(max_tokens=6)) == RejectCode.CANNOT_RESUME.value


@pytest.mark.parametrize(("last", "code"), [(9, ""), (10, "invalid_argument")])
def test_its_tokens_are_in_the_vocabulary(last: int, code: str) -> None:
    assert code_of(make_resume(output_ids=(1, last))) == code
