"""Logs: one JSON object a line, and never what a prompt says."""

import json

import pytest
import structlog

from services.kit.telemetry import log


@pytest.fixture(autouse=True)
def _restored_configuration():
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def crash(prompt: str) -> None:
    raise ZeroDivisionError(f"cannot serve {len(prompt)} characters")


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_logged_crash_does_not_show_the_prompt(monkeypatch, capsys, on_terminal) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal)
    log.configure("test", "info")

    secret = "prompt" * 3  # so that no line of source shows it
    try:
        crash(secret)
    except ZeroDivisionError:
        structlog.get_logger().exception("crashed")

    written = capsys.readouterr().err
    assert "ZeroDivisionError" in written
    assert secret not in written


def test_a_line_is_json_and_names_the_service(capsys) -> None:
    log.configure("test", "info")

    structlog.get_logger().info("request_ended", num_output_tokens=3)

    line = json.loads(capsys.readouterr().err)
    assert (line["service"], line["event"], line["num_output_tokens"]) == (
        "test", "request_ended", 3,
    )  # fmt: skip


def test_what_is_below_the_level_is_not_written(capsys) -> None:
    log.configure("test", "warning")

    structlog.get_logger().info("request_ended")

    assert capsys.readouterr().err == ""
