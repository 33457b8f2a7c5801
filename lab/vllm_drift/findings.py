"""Holds what is stated of vLLM against the vLLM that this process imports."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from services.executor.vllm_seam.stated import Stated

NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Finding:
    """One name, as vLLM has it."""

    name: str  # "module:member.attribute"
    signature: str = ""  # of what is called or overridden; whether there is what may be; else ""
    fault: str = ""  # what is not as stated; "" if nothing is


def findings(seam: Iterable[Stated]) -> Iterator[Finding]:
    """Yield what vLLM has of each name that is stated."""
    for stated in seam:
        try:
            theirs = member(stated.name)
        except (ImportError, AttributeError) as error:
            yield Finding(stated.name, fault=f"gone: {error}")
            continue
        yield Finding(stated.name)
        for call in stated.calls:
            name, positional, keywords = parse_call(call)
            yield _called(stated.name, theirs, name, Given(positional, keywords))
        for name in stated.overrides.split():
            yield _overridden(stated.name, theirs, name)
        for name in stated.fields.split():
            fault = "" if has_field(theirs, name) else "gone"
            yield Finding(f"{stated.name}.{name}", fault=fault)
        for name in stated.may_have.split():
            yield Finding(f"{stated.name}.{name}", "there" if has_field(theirs, name) else "absent")


def member(name: str) -> Any:
    """Return "module:member", or a module. Raises ImportError or AttributeError."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    if not attribute:
        return found
    if hasattr(found, attribute):
        return getattr(found, attribute)
    try:
        return importlib.import_module(f"{module}.{attribute}")
    except ImportError:
        raise AttributeError(f"{module} has no {attribute}") from None


@dataclass(frozen=True, slots=True)
class Given:
    """What a call of ours gives."""

    positional: tuple[str, ...]  # the names that vLLM has for them
    keywords: tuple[str, ...]


def parse_call(call: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return a call's name, "" if the thing itself is called, and the arguments that it gives."""
    name, _, arguments = call.partition("(")
    parsed = ast.parse(f"def call({arguments}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    positional = tuple(one.arg for one in parsed.args.args)
    return name, positional, tuple(one.arg for one in parsed.args.kwonlyargs)


def _called(owner: str, theirs: Any, name: str, given: "Given") -> Finding:
    full = f"{owner}.{name}" if name else f"{owner}()"
    function = getattr(theirs, name, None) if name else theirs
    if function is None:
        return Finding(full, fault="gone")
    signature = _signature(theirs, name, function)
    return Finding(full, str(signature), call_fault(signature, given))


def _overridden(owner: str, theirs: Any, name: str) -> Finding:
    full = f"{owner}.{name}"
    if not hasattr(theirs, name):
        return Finding(full, fault="gone: ours is never called")
    function = getattr(theirs, name)
    return Finding(full, str(_signature(theirs, name, function)) if callable(function) else "")


def _signature(owner: Any, name: str, function: Callable[..., Any]) -> inspect.Signature:
    """Return how a function is called: without what it is bound to, and without types."""
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    static = inspect.getattr_static(owner, name, None) if name else None
    is_unbound = inspect.isclass(owner) and inspect.isroutine(static)
    if is_unbound and not isinstance(static, staticmethod | classmethod):
        parameters = parameters[1:]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def call_fault(signature: inspect.Signature, given: Given) -> str:
    """Return why a function does not take a call, or takes it otherwise than stated; else ""."""
    parameters = list(signature.parameters.values())
    takes_more, takes_any = (any(one.kind is kind for one in parameters) for kind in MANY)
    places = [one.name for one in parameters if one.kind in NAMED]
    for number, name in enumerate(given.positional):
        if number >= len(places):
            if not takes_more:
                return f"takes no {name}"
            break
        if places[number] != name:
            return f"{places[number]} is where {name} was"
    unknown = [name for name in given.keywords if name not in signature.parameters]
    if unknown and not takes_any:
        return f"takes no {', '.join(unknown)}"
    filled = {*places[: len(given.positional)], *given.keywords}
    lacking = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in MANY and one.name not in filled
    ]
    return f"needs {', '.join(lacking)}" if lacking else ""


def has_field(theirs: Any, name: str) -> bool:
    """Return whether a module has a name, or a class or its instances have it."""
    if hasattr(theirs, name):
        return True
    kind = theirs if inspect.isclass(theirs) else type(theirs)
    return any(name in _own_fields(one) for one in kind.__mro__ if one is not object)


@cache
def _own_fields(kind: type) -> frozenset[str]:
    """Return what a class declares, and what its methods give to `self`."""
    declared = {*vars(kind), *inspect.get_annotations(kind)}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # made by C, or by a decorator
        return frozenset(declared)
    return frozenset(declared | set(given_to_self(tree)))


def given_to_self(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of `self` that a piece of source sets."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr
