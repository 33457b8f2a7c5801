"""Requests that begin alike: agents, documents, conversations, several answers to one prompt.

What is shared comes in whole pieces of `HASHED_TOKENS`, as in Mooncake's traces.
"""

import random
from collections.abc import Callable
from itertools import cycle, islice

from bench.who_runs.cases import Regime, deployed, on_gpu
from services.placement.types import RequestId
from simulator.workload import (
    HASHED_TOKENS,
    ArrivingRequest,
    as_conversations,
    gamma_gaps,
)

Requests = Callable[[int], list[ArrivingRequest]]
Lengths3 = tuple[int, int, int]


def beginning(name: str, num_tokens: int) -> tuple[int, ...]:
    """Return the hashes of so many tokens that all that name them begin with."""
    rng = random.Random(name)
    return tuple(rng.getrandbits(62) for _ in range(num_tokens // HASHED_TOKENS))


def asked(
    number: int, arrival_s: float, hashes: tuple[int, ...], num_own: int, num_answer: int
) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(f"r{number}"),
        arrival_s=arrival_s,
        num_prompt_tokens=HASHED_TOKENS * len(hashes) + num_own,
        num_output_tokens=num_answer,
        prompt_hashes=hashes,
    )


def agents(
    num_requests: int, *, shared: int, own: int, answer: int, num_kinds: int = 1
) -> Requests:
    """Return steps of agents that come at once; those of several kinds, in turn.

    Own parts and answers vary by a fifth.
    """

    def requests(seed: int) -> list[ArrivingRequest]:
        rng = random.Random(f"agents {seed}")
        kinds = cycle(beginning(f"kind {kind}", shared) for kind in range(num_kinds))
        return [
            asked(number, 0.0, hashes, varied(rng, own), varied(rng, answer))
            for number, hashes in enumerate(islice(kinds, num_requests))
        ]

    return requests


def varied(rng: random.Random, num_tokens: int) -> int:
    return round(num_tokens * rng.uniform(0.8, 1.2))


def documents(num_requests: int, *, rate_per_s: float) -> Requests:
    """Return questions about one of eight documents: 1k all + 3k of it + 4k own + 256."""

    def requests(seed: int) -> list[ArrivingRequest]:
        rng = random.Random(f"documents {seed}")
        gaps, arrival_s = gamma_gaps(rng, rate_per_s=rate_per_s, cv=1.0), 0.0
        made = []
        for number in range(num_requests):
            document = beginning(f"document {rng.randrange(8)}", 3_072)
            hashes = (*beginning("all", 1_024), *document)
            made.append(asked(number, arrival_s, hashes, varied(rng, 4_096), varied(rng, 256)))
            arrival_s += next(gaps)
        return made

    return requests


def several_answers(num_prompts: int, *, prompt: int, answer: int, rate_per_s: float) -> Requests:
    """Return prompts that are each answered four times (`n` = 4)."""

    def requests(seed: int) -> list[ArrivingRequest]:
        rng = random.Random(f"answers {seed}")
        gaps, arrival_s = gamma_gaps(rng, rate_per_s=rate_per_s, cv=1.0), 0.0
        made = []
        for number in range(num_prompts):
            hashes, own = beginning(f"prompt {seed} {number}", prompt), rng.randrange(HASHED_TOKENS)
            for which in range(4):
                length = varied(rng, answer)
                made.append(asked(4 * number + which, arrival_s, hashes, own, length))
            arrival_s += next(gaps)
        return made

    return requests


def turns(
    num: int, num_turns: int, lengths: Lengths3, *, rate_per_s: float, gap_s: float
) -> Requests:
    """Return conversations. `lengths`: of the first message, of each later one, and of answers."""

    def requests(seed: int) -> list[ArrivingRequest]:
        rng = random.Random(f"turns {seed}")
        gaps, arrival_s = gamma_gaps(rng, rate_per_s=rate_per_s, cv=1.0), 0.0
        made = []
        for number in range(num * num_turns):
            first, later, answer = lengths
            is_first = number % num_turns == 0
            arrival_s += next(gaps) if is_first else 0.0
            message = varied(rng, first if is_first else later)
            made.append(asked(number, arrival_s, (), message, varied(rng, answer)))
        return as_conversations(made, num_turns=num_turns, gap_s=gap_s)

    return requests


def regimes() -> dict[str, Regime]:
    """Return the regimes by name."""
    h100 = deployed("llama-3-8b", "h100", max_num_seqs=256, max_model_len=300_000)
    small = deployed("llama-3-8b", "rtx-4090", max_num_seqs=64)
    large = deployed("llama-3-70b", "h100", num_devices=4, max_num_seqs=256)
    agent = agents(32, shared=16_384, own=4_096, answer=512)
    found = {
        f"{name}, 32 agents, 16k + 4k + 512": on_gpu(where, agent)
        for name, where in (("8B, H100", h100), ("8B, 4090", small), ("70B, 4 x H100", large))
    }
    kinds = agents(32, shared=12_288, own=2_048, answer=512, num_kinds=4)
    found["8B, 4090, 4 kinds x 8 agents, 12k + 2k + 512"] = on_gpu(small, kinds)
    long = agents(16, shared=29_696, own=2_048, answer=512)
    found["8B, 4090, 16 agents, 30k + 2k + 512"] = on_gpu(small, long)
    short = agents(16, shared=8_192, own=1_024, answer=256)
    found["8B, H100, 16 agents, 8k + 1k + 256"] = on_gpu(h100, short)
    for name, where, rate in (("8B, H100", h100, 8.0), ("8B, 4090", small, 1.0)):
        found[f"{name}, RAG, {rate:g}/s"] = on_gpu(where, documents(64, rate_per_s=rate))
    four = several_answers(16, prompt=7_680, answer=400, rate_per_s=0.3)
    found["8B, 4090, n = 4, 8k + 400"] = on_gpu(small, four)
    chats = (500, 500, 300)
    found["8B, 4090, 40 chats of 10 turns"] = on_gpu(
        small, turns(40, 10, chats, rate_per_s=0.2, gap_s=30.0)
    )
    found["8B, H100, 200 chats of 10 turns"] = on_gpu(
        h100, turns(200, 10, chats, rate_per_s=2.0, gap_s=30.0)
    )
    # By the means of 357,161 published agent steps: 154k tokens in, 96 % of them said before, 523
    # out. Steps follow one another as a tool answers.
    sessions = turns(8, 40, (56_000, 4_500, 523), rate_per_s=1 / 60, gap_s=40.0)
    found["8B, H100, agent sessions, 154k + 523"] = on_gpu(h100, sessions)
    return found
