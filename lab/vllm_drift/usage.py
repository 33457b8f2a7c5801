"""Which of vLLM's names the executor's source uses, and where.

What is imported is known exactly, and so are methods that stand in for vLLM's. An attribute's
object has no type here: it counts as vLLM's if vLLM's source has that name for an attribute, and
neither our source nor what else the executor works with has.
"""

import argparse
import ast
import asyncio
import collections
import importlib
import inspect
import pathlib
import pkgutil
import re
import socket
import threading
from asyncio.subprocess import Process
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import psutil
import pydantic
import torch
import transformers
import vllm
import xgrammar

from services.executor.vllm_seam.stated import Stated

ROOT = Path(__file__).resolve().parents[2]
EXECUTOR = ROOT / "services" / "executor"
SEAM = EXECUTOR / "vllm_seam"
# Parts of vLLM whose objects the executor is given.
PARTS = ("config", "engine", "forward_context.py", "outputs.py", "parser", "renderers", "v1")
OF_OTHERS = (
    *(str, bytes, dict, list, set, tuple, int, float, type, BaseException, memoryview),
    *(argparse.ArgumentParser, asyncio.StreamReader, collections.deque, collections.OrderedDict),
    *(BaseProcess, Process, asyncio.Future, psutil.Process, socket.socket),
    *(threading.Thread, pathlib.Path),
    *(np.ndarray, torch.Tensor, torch.cuda.Stream, prometheus_client.Counter),
    *(pydantic.BaseModel, pydantic.ValidationInfo, transformers.PretrainedConfig),
    *(xgrammar.GrammarCompiler, xgrammar.GrammarMatcher, xgrammar.TokenizerInfo),
)
OF_CUDA = ("cuda_stream",)  # of torch's streams, where torch is built for it
# Functions, attributes of `self`, and what a class or a module declares. Read so, for all of vLLM
# takes a tenth of the time that parsing takes.
DEFINED = re.compile(r"\bdef (\w+)|\bself\.(\w+)|^(?:    )?(\w+)(?::| =)", re.MULTILINE)
BY_NAME = ("getattr", "hasattr", "setattr")  # whose second argument is an attribute's name


def unstated(seam: Iterable[Stated], sources: Iterable[Path] | None = None) -> dict[str, list[str]]:
    """Return the names of vLLM's that the seam lacks, with the files that use them."""
    seam = tuple(seam)
    names = {stated.name for stated in seam}
    attributes = {attribute for stated in seam for attribute in attributes_of(stated)}
    lacking: dict[str, list[str]] = {}
    for path in sources if sources is not None else executor_sources():
        tree = ast.parse(path.read_text())
        used = {name for name in imported(tree) if name not in names}
        used |= set(attributes_used(tree)) - attributes
        for name in used:
            lacking.setdefault(name, []).append(path.name)
    return lacking


def where_used(stated: Stated) -> list[str]:
    """Return the files of the executor that import a name, or else use attributes of it."""
    own = attributes_of(stated)
    ways = ("imports", "only_vllms", "attributes")  # the surest first
    found = (
        [path for path, uses in _uses().items() if getattr(uses, way) & {stated.name, *own}]
        for way in ways
    )
    return next((paths for paths in found if paths), [])


@dataclass(frozen=True, slots=True)
class Uses:
    """What one file uses."""

    imports: frozenset[str]
    only_vllms: frozenset[str]
    attributes: frozenset[str]  # whosever


@cache
def _uses() -> dict[str, Uses]:
    uses = {}
    for path in executor_sources():
        tree = ast.parse(path.read_text())
        every = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        uses[str(path.relative_to(EXECUTOR))] = Uses(
            frozenset(imported(tree)), frozenset(attributes_used(tree)), frozenset(every)
        )
    return uses


def attributes_of(stated: Stated) -> set[str]:
    """Return the attributes that are stated of a name."""
    called = {call.partition("(")[0] for call in stated.calls}
    named = f"{stated.overrides} {stated.fields} {stated.may_have}".split()
    return {*called, *named} - {""}


def executor_sources() -> list[Path]:
    """Return the executor's files but for the seam."""
    return [path for path in sorted(EXECUTOR.rglob("*.py")) if SEAM not in path.parents]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a file imports of vLLM, as the seam names it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_vllms(node.module or ""):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_vllms(alias.name))


def attributes_used(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes in a file that can only be vLLM's."""
    others = _names_of_others(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is_only_vllms(node.attr) and _root(node) not in others:
                yield node.attr
        elif isinstance(node, ast.Call) and _root(node) in BY_NAME and len(node.args) > 1:
            named = node.args[1]
            if isinstance(named, ast.Constant) and _is_only_vllms(str(named.value)):
                yield str(named.value)


def overridden() -> Iterator[tuple[type, type, str]]:
    """Yield our class, vLLM's and the name, wherever a method of ours stands in for vLLM's."""
    for ours in _classes_over_vllms():
        own = [one for one in ours.__mro__ if one.__module__.startswith("services.")]
        for name in {name for one in own for name in vars(one) if not name.startswith("__")}:
            above = ours.__mro__[ours.__mro__.index(next(o for o in own if name in vars(o))) :]
            theirs = next((o for o in above if _is_vllms(o.__module__) and name in vars(o)), None)
            if theirs is not None and not name.startswith("_abc_"):
                yield ours, theirs, name


def _classes_over_vllms() -> Iterator[type]:
    package = importlib.import_module("services.executor")
    for module in pkgutil.walk_packages(package.__path__, "services.executor."):
        if module.name.endswith("__main__"):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            is_own = inspect.isclass(kind) and kind.__module__ == module.name
            if is_own and any(_is_vllms(one.__module__) for one in kind.__mro__):
                yield kind


def _is_vllms(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _root(node: Any) -> str:
    """Return the name that an expression begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names_of_others(tree: ast.AST) -> set[str]:
    """Return what a file imports of others than vLLM."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and not _is_vllms(node.module or ""))
        for alias in node.names
        if not _is_vllms(alias.name)
    }


def _is_only_vllms(name: str) -> bool:
    return name in _attributes_of_vllm() and name not in _attributes_of_others()


@cache
def _attributes_of_vllm() -> frozenset[str]:
    package = Path(vllm.__file__).parent
    paths = [path for part in PARTS for path in _python(package / part)]
    return frozenset(name for path in paths for name in _defined(path))


@cache
def _attributes_of_others() -> frozenset[str]:
    ours = [*(ROOT / "services").rglob("*.py"), *(ROOT / "protos").rglob("*.pyi")]
    named = {name for path in ours if SEAM not in path.parents for name in _defined(path)}
    return frozenset(named.union(OF_CUDA, *(dir(one) for one in OF_OTHERS)))


def _python(path: Path) -> Iterable[Path]:
    return path.rglob("*.py") if path.is_dir() else [path]


def _defined(path: Path) -> Iterator[str]:
    """Yield the names of a file's functions and of its classes' attributes."""
    return (name for names in DEFINED.findall(path.read_text()) for name in names if name)
