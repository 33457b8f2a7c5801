"""What a pace costs whose model thinks first: the time until the first word, paced and at once.

A real executor on the CPU, and a gateway. The same requests in turn, one at a time: with a pace and
without. Thoughts are about as long as many are; text goes out at the reader's rate.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

from bench.document import Benchmark, Row
from bench.gateway.heavy_requests import Edge
from bench.gateway.large_chats import one_gateway
from lab.stack.executor_process import ExecutorProcess
from lab.thinking_model import END_OF_THOUGHT, save_thinking_model

MODEL = "thinker"
RATE_TPS = 8.0  # at which text is read
LEAST_THOUGHTS, MOST_THOUGHTS = 350, 700  # tokens
NUM_WORDS = 40  # tokens of text behind them
TOKENS_PER_PART = 1.1  # at most: some tokens are no text yet
END_BIAS = 1.5  # of the mark's logit: it comes after some hundreds of tokens
NUM_REQUESTS, NUM_REPEATS = 3, 5
MAX_RATIO = 1.05
PACED = {"evenflow": {"consumption_rate_tps": RATE_TPS, "pace_tail": True}}


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        executor = ExecutorProcess(
            Path(directory) / "executor.log",
            MODEL=save_thinking_model(Path(directory) / MODEL),
            SERVED_MODEL_NAME=MODEL,
            REASONING_PARSER="deepseek_r1",
            MAX_MODEL_LEN=2_048,
        )
        with executor.serving(), one_gateway(executor.address, MODEL) as edge:
            answers = _answers(edge)
            return [
                {"seed": seed, "paced": bool(more), **_asked(edge, seed, num_tokens, more)}
                for _ in range(NUM_REPEATS)
                for seed, num_tokens in answers.items()
                for more in (PACED, {})
            ]


def _answers(edge: Edge) -> dict[int, int]:
    """Return seeds of answers that think as long as many do, and how many tokens each needs."""
    answers = dict[int, int]()
    for seed in count():
        seen = _asked(edge, seed, int(TOKENS_PER_PART * MOST_THOUGHTS) + NUM_WORDS, {})
        num_thoughts = seen["num_thoughts"]
        if LEAST_THOUGHTS <= num_thoughts <= MOST_THOUGHTS and seen["words_s"]:
            answers[seed] = int(TOKENS_PER_PART * num_thoughts) + NUM_WORDS
        if len(answers) == NUM_REQUESTS:
            return answers
    raise AssertionError


def _asked(edge: Edge, seed: int, num_tokens: int, more: dict[str, Any]) -> Row:
    """Ask, and return how many thoughts came, and when each part of the text, from the asking."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Rain?"}],
        "stream": True,
        "seed": seed,
        "temperature": 1,
        "max_tokens": num_tokens,
        "logit_bias": {str(END_OF_THOUGHT): END_BIAS},
        "ignore_eos": True,
        **more,
    }
    begun_s, num_thoughts, words_s = time.monotonic(), 0, list[float]()
    with httpx.stream("POST", f"{edge.url}/v1/chat/completions", json=body, timeout=600) as answer:
        for delta in _deltas(answer):
            num_thoughts += bool(delta.get("reasoning") or delta.get("reasoning_content"))
            if delta.get("content"):
                words_s.append(time.monotonic() - begun_s)
    return {"num_thoughts": num_thoughts, "words_s": words_s}


def _deltas(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice["delta"]


def _first_words_s(rows: Sequence[Row], seed: int, *, paced: bool) -> list[float]:
    return [r["words_s"][0] for r in rows if (r["seed"], r["paced"]) == (seed, paced)]


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["seed", "thoughts", "first word, s, at once", "paced", "ratio", "text, tokens/s"]]
    for seed in dict.fromkeys(row["seed"] for row in rows):
        paced = [row for row in rows if row["seed"] == seed and row["paced"]]
        at_once_s, paced_s = (_first_words_s(rows, seed, paced=one) for one in (False, True))
        gaps_s = [after - before for row in paced for before, after in pairwise(row["words_s"])]
        lines.append(
            [
                str(seed),
                str(paced[0]["num_thoughts"]),
                f"{median(at_once_s):.2f}",
                f"{median(paced_s):.2f}",
                f"{median(paced_s) / median(at_once_s):.2f}",
                f"{1 / mean(gaps_s):.1f}",
            ]
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether the first word comes as soon with a pace."""
    ratios = [float(line[4]) for line in table(rows)[1:]]
    return [f"first words at {median(ratios):.2f} x the time at once (bar {MAX_RATIO})"]


BENCHMARK = Benchmark(
    name="thinking",
    title=f"A model that thinks, read at {RATE_TPS:.0f} tokens/s",
    definitions={
        "thoughts": "parts of the answer's reasoning, about one a token",
        "first word": "from sending the request to the first part of its text, median of "
        f"{NUM_REPEATS} repeats in turn",
        "text": "parts of the text per second, when it is paced",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
