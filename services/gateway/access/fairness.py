"""Among which ids an executor shares its KV pool: a header's, else the API key's name."""

from collections.abc import Mapping

from services.gateway.access.api_keys import current_account, current_caller
from services.kit.errors import InvalidRequestError

# Our own first, then llm-d's, which its gateways queue by.
FAIRNESS_HEADERS = ("x-evenflow-fairness-id", "x-llm-d-inference-fairness-id")
MAX_FAIRNESS_ID_LENGTH = 256  # characters


def stated_fairness_id(headers: Mapping[str, str]) -> str:
    """Return the id that headers, or a call's metadata, state; empty: none. Raises
    InvalidRequestError naming the headers at fault.
    """
    given = {name: headers[name] for name in FAIRNESS_HEADERS if headers.get(name)}
    if len(set(given.values())) > 1:
        rule = f"{' and '.join(given)}: must not differ"
        raise InvalidRequestError(rule, field=FAIRNESS_HEADERS[0])
    name, stated = next(iter(given.items()), ("", ""))
    if len(stated) > MAX_FAIRNESS_ID_LENGTH:
        rule = f"must have at most {MAX_FAIRNESS_ID_LENGTH} characters"
        raise InvalidRequestError(f"{name}: {rule}", field=name)
    return stated


def fairness_id(stated: str) -> str:
    """Return the id of this task's work: what is stated, if the caller may state any, else the
    caller's name; empty without keys.
    """
    caller = current_caller()
    may_state = caller is None or caller.may_state_fairness_ids
    return (stated if may_state else "") or current_account()
