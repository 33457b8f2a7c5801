"""What a scheduler's requests tell of themselves."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.scheduler.engine_requests import told_length


@pytest.mark.parametrize(("max_tokens", "told"), [(1, 0), (2, 1), (9, 1)])
def test_an_answer_that_may_have_one_token_says_nothing_of_other_answers_lengths(
    max_tokens: int, told: int
) -> None:
    request: Any = SimpleNamespace(status=None, max_tokens=max_tokens, num_output_tokens=1)

    assert told_length(request) == told
