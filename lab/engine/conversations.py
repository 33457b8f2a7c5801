"""Multi-turn conversations: each turn's prompt is the last one's, its answer, and a new message."""

from collections.abc import Iterator, Mapping, Sequence

from lab.engine.step_runner import Arrival, make_prompt

Answers = Mapping[str, Sequence[int]]  # tokens by request id

NUM_CONVERSATIONS, NUM_TURNS = 8, 4
STEPS_PER_TURN = 60
NUM_ANSWER_TOKENS = 30
SYSTEM = make_prompt(70, seed=1_000)  # what every conversation begins with
BRANCH, TWIN, SALTED = "branch", "twin", "salted"


def conversations(answers: Answers) -> list[Arrival]:
    """Return the requests whose history is in `answers`; without any, the first turns.

    Beside the conversations: another last turn of one of them, the same turn twice in a step, and
    one that shares nothing, because of its salt.
    """
    arrivals = [
        arrival for number in range(NUM_CONVERSATIONS) for arrival in _turns(number, answers)
    ]
    by_name = {arrival.request_id: arrival for arrival in arrivals}
    if last := by_name.get(_name(0, NUM_TURNS - 1)):
        other = make_prompt(40, seed=5_000)
        prompt = [*last.prompt[: len(last.prompt) - len(_message(0, NUM_TURNS - 1))], *other]
        arrivals.append(_request(BRANCH, prompt, last.step))
        arrivals.append(_request(SALTED, last.prompt, last.step, salt="somebody else's"))
    if twice := by_name.get(_name(1, 2)):
        arrivals.append(_request(TWIN, twice.prompt, twice.step))
    return arrivals


def _turns(number: int, answers: Answers) -> Iterator[Arrival]:
    prompt = list(SYSTEM)
    for turn in range(NUM_TURNS):
        name = _name(number, turn)
        prompt = [*prompt, *_message(number, turn)]
        yield _request(name, prompt, turn * STEPS_PER_TURN + 2 * number)
        if name not in answers:
            return
        prompt = [*prompt, *answers[name]]


def _name(number: int, turn: int) -> str:
    return f"c{number}.{turn}"


def _message(number: int, turn: int) -> list[int]:
    return make_prompt(30 + 7 * number + 3 * turn, seed=2_000 + 100 * number + turn)


def _request(name: str, prompt: Sequence[int], step: int, *, salt: str = "") -> Arrival:
    return Arrival(
        request_id=name,
        prompt=prompt,
        num_output_tokens=NUM_ANSWER_TOKENS,
        step=step,
        cache_salt=salt,
    )
