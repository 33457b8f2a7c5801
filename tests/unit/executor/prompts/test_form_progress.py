"""A form hears of an answer's tokens one by one, each behind those before it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.prompts.form_progress import advance, ids_of_form

END_OF_THOUGHT = 9
PROMPT = [1, 2]


class Manager:
    """Stands for vLLM's: what is behind the end of the thoughts is told to the grammar."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []  # all tokens, at each that it is told of

    def accept_tokens(self, request: Any, ids: Sequence[int]) -> bool:
        self.seen.append(list(request.all_token_ids))
        assert request.all_token_ids[-len(ids) :] == ids
        if END_OF_THOUGHT not in request.all_token_ids[:-1]:
            return True
        grammar = request.structured_output_request.grammar
        return bool(grammar.accept_tokens(request.request_id, ids))


class Grammar:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def accept_tokens(self, _request_id: str, ids: Sequence[int]) -> bool:
        self.ids += ids
        return 0 not in ids


@pytest.fixture
def request_() -> Any:
    """A request that has its output already."""
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=PROMPT,
        all_token_ids=[*PROMPT, 7, END_OF_THOUGHT, 3, 4],
        structured_output_request=SimpleNamespace(grammar=Grammar()),
    )


def test_each_token_is_the_newest_when_it_is_told(request_: Any) -> None:
    manager: Any = Manager()

    assert advance(manager, request_, [7, END_OF_THOUGHT, 3, 4])
    assert [len(seen) for seen in manager.seen] == [3, 4, 5, 6]
    assert request_.structured_output_request.grammar.ids == [3, 4]


def test_what_the_form_does_not_allow_ends_it(request_: Any) -> None:
    manager: Any = Manager()

    assert not advance(manager, request_, [7, END_OF_THOUGHT, 0, 4])
    assert request_.structured_output_request.grammar.ids == [0]


def test_thoughts_are_none_of_the_form_s(request_: Any) -> None:
    manager: Any = Manager()

    assert ids_of_form(manager, request_, [7, END_OF_THOUGHT, 0, 4]) == (0, 4)
