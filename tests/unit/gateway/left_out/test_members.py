"""What a client is told of what is left out."""

import pytest

from services.gateway.left_out.members import MAX_NAMES, note


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a_B-9", "a_B-9"),
        ("a" * 64, "a" * 64),
        ("a" * 65, "other"),
        ("", "other"),
        ("a.b", "other"),
        ("a\n", "other"),
        ("\N{SNOWMAN}", "other"),
    ],
)
def test_a_name_that_no_header_can_have_is_told_as_other(name: str, told: str) -> None:
    names: set[str] = set()

    note(names, "tools.", name)

    assert names == {f"tools.{told}"}


def test_so_many_names_are_told_and_no_more() -> None:
    names: set[str] = set()

    for k in range(MAX_NAMES + 1):
        note(names, "", f"n{k}")

    assert names == {f"n{k}" for k in range(MAX_NAMES)}
