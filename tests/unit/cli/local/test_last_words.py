"""What a process said before it ended: the cause, not what follows from it."""

from cli.local.last_words import NUM_LINES, last_words


def test_without_a_traceback_the_last_lines_are_told() -> None:
    lines = [f"line {number}" for number in range(40)]

    assert last_words(lines) == lines[-NUM_LINES:]


def test_a_bad_setting_is_told_as_it_was() -> None:
    said = ["EVENFLOW_EXECUTOR_DTYPE: Input should be 'auto' or 'float32'"]

    assert last_words(["", *said, ""]) == said


def test_the_engines_cause_is_told_and_not_the_front_that_points_at_it() -> None:
    where = "(EngineCore pid=7) ERROR 11-22 22:27:05 [core.py:1] "
    lines = [
        "INFO starting",
        f"{where}Traceback (most recent call last):",
        f'{where}  File "core.py", line 1, in run',
        f"{where}ValueError: the pool is too small",
        "Traceback (most recent call last):",
        '  File "app.py", line 1, in main',
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}",
    ]

    assert last_words(lines) == ["ValueError: the pool is too small"]


def test_an_exception_of_several_lines_is_told_with_them() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "config.py", line 1, in create',
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, the model has no such length [type=value_error]",
        "    For further information visit a page",
        "INFO stopped",
    ]

    assert last_words(lines) == lines[2:5]


def test_a_process_that_said_nothing_has_no_last_words() -> None:
    assert last_words([]) == []
