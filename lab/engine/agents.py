"""Requests that begin alike and run at once: agents on a few prompts of different lengths."""

from collections.abc import Sequence

from lab.engine.step_runner import Arrival, make_prompt

SHORT, LONG, LARGE = (make_prompt(n, seed=40_000 + n) for n in (290, 420, 860))
BRANCHES = [[*LONG, *make_prompt(n, seed=41_000 + n)] for n in (260, 300)]  # two levels
PREFIXES: Sequence[Sequence[int]] = (SHORT, LONG, *BRANCHES, LARGE)
USERS_PER_PREFIX = 5
FOLLOW_AFTER = 30  # steps, from the first of a prefix to the next ones, where they let it end
AT_ONCE = 2  # where they come while its prompt is computed, or has just been
SALTED, TWINS = "salted", ("twin.0", "twin.1")


def agents() -> list[Arrival]:
    """Return agents on each prefix, the first of each ahead of the others, by much or little.

    Beside them: two that are the same in all, at once, and one that shares nothing for its salt.
    """
    arrivals = [
        _agent(f"a{kind}.{number}", prefix, _step(kind, number), own=9 + 5 * number)
        for kind, prefix in enumerate(PREFIXES)
        for number in range(USERS_PER_PREFIX)
    ]
    twins = [_agent(name, LONG, _step(1, 2), own=20) for name in TWINS]
    return [*arrivals, *twins, _agent(SALTED, LONG, _step(1, 2), own=30, salt="somebody else's")]


def _step(kind: int, number: int) -> int:
    after = AT_ONCE if kind % 2 else FOLLOW_AFTER
    return 90 * kind + (after + 4 * number if number else 0)


def _agent(name: str, prefix: Sequence[int], step: int, *, own: int, salt: str = "") -> Arrival:
    seed = sum(map(ord, name)) + 1_000 * own
    return Arrival(
        request_id=name,
        prompt=[*prefix, *make_prompt(own, seed=seed)],
        num_output_tokens=60 if name.endswith(".0") else 40,
        step=step,
        cache_salt=salt,
    )
