"""Compiles grammars for `GrammarCheck`, in a process of its own that can be ended.

Reads a line of JSON for each: first xgrammar's description of the tokeniser, then `[kind, text]`,
kind being a name of vLLM's. Writes a line of JSON for each grammar: what is wrong with it, or "".
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys

import xgrammar as xgr

PR_SET_PDEATHSIG = 1  # of prctl(2)
NICENESS = 5  # the engine goes first
MAX_ADDED_BYTES = 1 << 30  # address space beyond what the libraries take
MAX_COMPILED_BYTES = 64 << 20  # which the engine keeps
TOO_LARGE = "takes too much memory"
NO_ANSWER = "no answer can have this form"
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # that xgrammar puts before its messages


def fault_of(compiler: xgr.GrammarCompiler, kind: str, text: str) -> str:
    """Return why no answer can be held to a grammar; empty if one can begin."""
    try:
        compiled = _compile(compiler, kind, text)
        matcher = xgr.GrammarMatcher(compiled)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        return message_of(error)
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        return TOO_LARGE
    mask = xgr.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    is_restricted = matcher.fill_next_token_bitmask(mask)
    return NO_ANSWER if is_restricted and not mask.any() else ""


def message_of(error: Exception) -> str:
    """Return what xgrammar says, without its place in xgrammar's source."""
    return _SOURCE_PLACE.sub("", str(error)).strip() or repr(error)


def _compile(compiler: xgr.GrammarCompiler, kind: str, text: str) -> xgr.CompiledGrammar:
    match kind:
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


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    compiler = make_compiler(json.loads(sys.stdin.readline()))
    _limit_memory()
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        print(json.dumps(fault_of(compiler, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
