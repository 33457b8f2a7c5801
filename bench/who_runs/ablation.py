"""What is each rule of `evenflow` worth? The same requests with one of them out of force."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from bench.document import Row
from bench.who_runs.__main__ import measured
from services.placement.run import evenflow, promise, prompts

Change = tuple[Any, str, Any]  # object, attribute, what stands there instead


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _everybody(snapshot: Any, members: Any) -> frozenset[str]:
    return frozenset(request.request_id for request in members)


def _as_they_came(queue: Iterable[Any], **given: Any) -> list[Any]:
    return list(queue)


def _rules(**given: Any) -> Change:
    return evenflow.decide, "__defaults__", (replace(evenflow.DEFAULT_RULES, **given),)


WITHOUT: Mapping[str, Change | None] = MappingProxyType(
    {
        "all rules": None,
        "no layers on the host": (evenflow._Draft, "_pays", _always(False)),
        "*generates no slower* off": (evenflow._Draft, "_pays", _always(True)),
        "prompts need not be covered": (evenflow, "are_hidden", _always(True)),
        "no turns": (evenflow, "can_take_turns", _always(False)),
        "turns however few fit": (evenflow, "can_take_turns", _always(True)),
        "nothing is promised": (promise.Promise, "holds", _always(False)),
        "everything is promised": (promise.Promise, "holds", _always(True)),
        "all are sure": (evenflow, "sure_ones", _everybody),
        "room left stays empty": (evenflow._Draft, "fill_room", _always(None)),
        "pieces however few fit": (prompts, "holds_few", _always(False)),
        "chunks as vLLM's": (evenflow, "chunk_tokens", _always(None)),
        "TTFT SLOs by arrival": (evenflow, "in_line", _as_they_came),
        "any number of prompts": _rules(most_prompts=512),
        "short pieces always": _rules(slow_frac=-1.0),
    }
)
REGIMES = (
    "bench 300 MB/s, S x 1.5",
    "7B, H100, 9k + 600, 1.0/s",
    "7B, H100, TTFT SLOs, 0.7/s",
    "8B, A5000, 6k + 800, 0.25/s",
)


def out_of_force(rules: str) -> AbstractContextManager[Any]:
    """Return what takes a rule of WITHOUT out of force while it is entered."""
    change = WITHOUT[rules]
    return patch.object(*change) if change else nullcontext()


def run(regime: str, rules: str, seed: int) -> Row:
    """Return the figures of one run with a rule out of force."""
    with out_of_force(rules):
        return measured(regime, "evenflow", seed)
