"""Compiles grammars for `GrammarCheck`, in a process of its own that can be ended.

Reads a line of JSON for each: first xgrammar's description of the tokeniser, then `[kind, text,
ids, cpu_s]`, kind being a name of vLLM's and ids the tokens that an answer has already. Writes a
line of JSON for each: what is wrong with the grammar, or ""; a number, as `subprocess` has them, if
a fork ended without an answer: -SIGPROF after `cpu_s` seconds of a processor.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import xgrammar as xgr

from services.kit.errors import shortened

PR_SET_PDEATHSIG = 1  # of prctl(2)
NICENESS = 5  # the engine goes first
BRIEF_S = 0.1  # a form that may take no longer goes beside it
MAX_ADDED_BYTES = 1 << 30  # address space beyond what the libraries take
MAX_COMPILED_BYTES = 64 << 20  # which the engine keeps
# End a fork at once: xgrammar's own handlers write traces, which takes seconds or hangs.
DEADLY_SIGNALS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)
TOO_LARGE = "takes too much memory"
NO_ANSWER = "no answer can have this form"
NOT_THIS_ANSWER = "the answer does not have this form"
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # that xgrammar puts before its messages


def fault_of(compiler: xgr.GrammarCompiler, kind: str, text: str, ids: Sequence[int] = ()) -> str:
    """Return why no answer can be held to a grammar, or not the one that begins with `ids`; empty
    if it can.
    """
    try:
        compiled = _compile(compiler, kind, text)
        matcher = xgr.GrammarMatcher(compiled)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        return message_of(error)
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        return TOO_LARGE
    mask = xgr.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    is_restricted = matcher.fill_next_token_bitmask(mask)
    if is_restricted and not mask.any():
        return NO_ANSWER
    return "" if _allows(matcher, ids) else NOT_THIS_ANSWER


def _allows(matcher: xgr.GrammarMatcher, ids: Sequence[int]) -> bool:
    """Return whether the grammar allows these tokens up to its end, as vLLM asks it."""
    return all(matcher.is_terminated() or matcher.accept_token(id) for id in ids)


def message_of(error: Exception) -> str:
    """Return what xgrammar says, without its place in xgrammar's source."""
    return _SOURCE_PLACE.sub("", str(error)).strip() or repr(error)


def _compile(compiler: xgr.GrammarCompiler, kind: str, text: str) -> xgr.CompiledGrammar:
    match kind:
        case "json_object":
            schema = '{"type": "object"}'
            return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        case "json":
            # Of this kind where all white space is disabled; else it is a structural tag.
            return compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"))
        case "regex":
            return compiler.compile_regex(text)
        case "grammar":
            return compiler.compile_grammar(text)
        case "structural_tag":
            return compiler.compile_structural_tag(text)
        case _:
            raise ValueError(f"unknown kind of grammar: {kind}")


def make_compiler(tokenizer_info: str) -> xgr.GrammarCompiler:
    """Return a compiler that uses one core and keeps nothing."""
    info = xgr.TokenizerInfo.deserialize_json(tokenizer_info)
    return xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        num_pages = int(statm.read().split()[0])
    most = num_pages * resource.getpagesize() + MAX_ADDED_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most <= hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer_of_fork(compiler: xgr.GrammarCompiler, question: Sequence[Any]) -> str | int:
    """Return what a fork of this process says, or how it ended. The imports are done."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(writer, compiler, *question)
    os.close(writer)
    with open(reader) as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) or said


def _answer(writer: int, compiler: xgr.GrammarCompiler, *question: Any) -> NoReturn:
    """Write a grammar's fault, if it is known after `cpu_s` seconds of a processor, and exit."""
    kind, text, ids, cpu_s = question
    try:
        _die_with_parent()
        for number in DEADLY_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.nice(NICENESS if cpu_s > BRIEF_S else 0)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        with open(writer, "w") as answer:
            answer.write(shortened(fault_of(compiler, kind, text, ids)))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the code of the parent must not go on in the fork
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    _die_with_parent()
    compiler = make_compiler(json.loads(sys.stdin.readline()))
    _limit_memory()
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer_of_fork(compiler, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
