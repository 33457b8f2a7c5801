"""Structured logs: JSON lines, or colours on a terminal."""

import logging
import sys
from typing import Literal

import structlog

Level = Literal["debug", "info", "warning", "error"]


def configure(service: str, level: Level) -> None:
    """Set up structlog for this process; every line carries `service` and the bound request id."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(on_terminal=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def _renderers(*, on_terminal: bool) -> list[structlog.typing.Processor]:
    """Return what turns an event into text. Tracebacks never show locals: they hold prompts."""
    if on_terminal:
        formatter = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=formatter)]
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]
