"""How a name of vLLM's is stated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stated:
    """A module's member, or a module, and what the executor does with it."""

    name: str  # "module:member", or "module"
    calls: tuple[str, ...] = ()  # "method(positional, *, keyword)"; "(...)": it itself is called
    overrides: str = ""  # methods that ours stand in for: ours take what vLLM gives them
    fields: str = ""  # attributes that are read or written, of its instances too
    may_have: str = ""  # attributes that some versions have, and the executor asks for
