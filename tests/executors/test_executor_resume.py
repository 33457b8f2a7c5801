"""An executor goes on with answers that were begun elsewhere, and refuses what it cannot.

`EVENFLOW_RESUME_SEED` and `EVENFLOW_RESUME_DRAWN` set which requests are drawn, and how many.
"""

import asyncio
import os
import random
from typing import Any

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.executor_client import ANSWER_TIMEOUT_S, GatewayStream, resume_of
from lab.models import MAX_MODEL_LEN
from lab.stack.executor_process import ExecutorProcess
from tests.executors.continuing import assert_goes_on, returned_tokens
from tests.stock_requests import GREEDY, PROMPT

pytestmark = pytest.mark.timeout(3_600)

SEED = int(os.environ.get("EVENFLOW_RESUME_SEED", "1"))
NUM_DRAWN = int(os.environ.get("EVENFLOW_RESUME_DRAWN", "300"))
NUM_AT_ONCE = 24
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'
ASKED: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 1, "seed": 7, "max_tokens": 40, "presence_penalty": 0.5},
    "likely": {"temperature": 1, "seed": 5, "max_tokens": 24, "logprobs": 3},
    "schema": {"temperature": 0, "structured_outputs": gen.StructuredOutputs(json_schema=SCHEMA)},
    "object": {
        "temperature": 0,
        "max_tokens": 24,
        "structured_outputs": gen.StructuredOutputs(json_object=True),
    },
}


@pytest.fixture(scope="module")
def executor(plain_executor: ExecutorProcess) -> ExecutorProcess:
    return plain_executor


async def test_it_is_told_where_answers_go_on_and_what_rounds(gateway: GatewayStream) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert len(info.fingerprint) == 32
    assert "tensor parallel 1" in info.numerics
    assert info.is_repeatable  # in float32


@pytest.mark.parametrize("name", ASKED)
async def test_the_rest_of_an_answer_is_as_if_nothing_had_happened(
    gateway: GatewayStream, name: str
) -> None:
    fields = {"text": PROMPT, "sampling": ASKED[name]}
    answer = await gateway.ask(name, **fields)

    await assert_goes_on(gateway, name, answer, **fields)


async def test_it_counts_what_of_an_answer_it_found_and_what_it_computed(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    block_size = (await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())).block_size
    sampling = {**GREEDY, "max_tokens": block_size, "ignore_eos": True}
    fields = {"text": f"Said once. {PROMPT}", "sampling": sampling}
    answer = await gateway.ask("whole", **fields)
    before = returned_tokens(executor)
    await gateway.ask("goes on", **fields, resume=resume_of(answer, block_size - 1))
    after = returned_tokens(executor)

    num_tokens = (answer.num_prompt_tokens or 0) + block_size - 1
    num_found = (num_tokens - 1) // block_size * block_size
    assert num_found > 0
    assert {name: after[name] - before[name] for name in after} == {
        "found": num_found,
        "computed": num_tokens - num_found,
    }


@pytest.mark.parametrize("is_told", [False, True])
async def test_an_answer_ends_at_a_string_that_it_had_a_part_of(
    gateway: GatewayStream, is_told: bool
) -> None:
    whole = await gateway.ask("whole", text=PROMPT, sampling=GREEDY)
    stop = whole.text[40:50]
    fields = {"text": PROMPT, "sampling": {**GREEDY, "stop": [stop], "include_stop": is_told}}
    answer = await gateway.ask("stopped", **fields)

    assert answer.finish_reason == "STOP"
    await assert_goes_on(gateway, "stopped", answer, **fields)


async def test_an_echo_is_not_given_back_again(gateway: GatewayStream) -> None:
    fields = {"text": PROMPT, "sampling": {**GREEDY, "logprobs": 1}, "echo": True}
    answer = await gateway.ask("echo", **fields)

    assert answer.prompt is not None
    await assert_goes_on(gateway, "echo", answer, **fields)


@pytest.mark.parametrize(
    ("changed", "code", "field"),
    [
        ({"output_ids": [5, 10**6]}, "INVALID_ARGUMENT", "resume.output_ids"),
        ({"output_ids": []}, "INVALID_ARGUMENT", "resume.output_ids"),
        ({"max_tokens": 1}, "INVALID_ARGUMENT", "resume.max_tokens"),
        ({"prompt_digest": 1}, "CANNOT_RESUME", "resume"),
        ({"max_tokens": MAX_MODEL_LEN}, "CANNOT_RESUME", "resume"),
    ],
)
async def test_what_cannot_go_on_here_is_refused(
    gateway: GatewayStream, changed: dict[str, Any], code: str, field: str
) -> None:
    answer = await gateway.ask("answer", text=PROMPT, sampling=GREEDY)
    resume = resume_of(answer, 3)
    for name, value in changed.items():
        resume.ClearField(name)
        resume.MergeFrom(pb.Resume(**{name: value}))
    refused = await gateway.ask("refused", text=PROMPT, sampling=GREEDY, resume=resume)

    assert (refused.reject_code, refused.rejected and refused.rejected.field) == (code, field)


@pytest.mark.parametrize("name", ["schema", "object"])
async def test_tokens_that_a_form_does_not_allow_are_refused(
    gateway: GatewayStream, name: str
) -> None:
    fields = {"text": PROMPT, "sampling": ASKED[name]}
    free = await gateway.ask("free", text=PROMPT, sampling=GREEDY)
    refused = await gateway.ask("refused", **fields, resume=resume_of(free, 3))

    assert refused.reject_code == "CANNOT_RESUME"


async def test_tokens_behind_the_end_of_an_answer_are_refused(gateway: GatewayStream) -> None:
    whole = await gateway.ask("whole", text=PROMPT, sampling=GREEDY)
    sampling = {**GREEDY, "stop": [whole.text[20:30]]}
    refused = await gateway.ask(
        "refused", text=PROMPT, sampling=sampling, resume=resume_of(whole, 40)
    )

    assert refused.reject_code == "INVALID_ARGUMENT"


async def test_a_newer_stream_takes_over_what_the_older_one_had(
    executor: ExecutorProcess, gateway: GatewayStream
) -> None:
    """The older one's link is broken, and nothing has told the executor."""
    long = {"temperature": 0, "max_tokens": MAX_MODEL_LEN - 512, "ignore_eos": True}
    async with GatewayStream(executor.address, gateway_id="g", epoch=1) as older:
        answer = await older.submit("long", text=PROMPT, sampling=long)
        await older.has_tokens(answer, 20)
        async with GatewayStream(executor.address, gateway_id="g", epoch=2) as newer:
            resume = pb.Resume(output_ids=answer.ids[:16], max_tokens=32)
            rest = await newer.ask("long", text=PROMPT, sampling=long, resume=resume)
            await asyncio.wait_for(older.reader, timeout=ANSWER_TIMEOUT_S)

    expected = await gateway.ask("whole", text=PROMPT, sampling={**long, "max_tokens": 32})
    assert rest.ids == expected.ids[16:]
    assert answer.ending is None


async def test_frames_come_while_requests_live_and_tell_the_engine_s_steps(
    gateway: GatewayStream,
) -> None:
    """A held request makes no token, and the engine is seen to step all the same."""
    long = {"temperature": 0, "max_tokens": MAX_MODEL_LEN - 512, "ignore_eos": True}
    answer = await gateway.submit("held", text=PROMPT, sampling=long)
    await gateway.wait(answer.started)
    await gateway.hold("held")
    await gateway.observed("held", pb.REQUEST_STATE_PAUSED)
    num_before = len(gateway.frames)
    await gateway.until(lambda: len(gateway.frames) >= num_before + 4)
    await gateway.abort(answer, "held")

    steps = [frame.num_engine_steps for frame in gateway.frames[num_before:]]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0] > 0
    assert not any(frame.is_leaving for frame in gateway.frames)


async def test_whatever_is_asked_for_the_engine_answers_the_next_request(
    gateway: GatewayStream,
) -> None:
    """Fields at random, malformed or not, many at once, each with a form or without."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    answer = await gateway.ask("answer", text=PROMPT, sampling=GREEDY)
    turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def drawn(n: int) -> bool:
        resume = resume_of(answer, rng.randrange(1, 48))
        for _ in range(rng.randrange(3)):
            _disturb(resume, rng)
        sampling = {"max_tokens": 8, **rng.choice(list(ASKED.values()))}
        async with turns:
            got = await gateway.ask(f"fuzz {n}", text=PROMPT, sampling=sampling, resume=resume)
        assert (got.ending is None) is (got.rejected is not None)
        return got.rejected is None

    taken = await asyncio.gather(*map(drawn, range(NUM_DRAWN)))
    assert NUM_DRAWN // 10 <= sum(taken) <= NUM_DRAWN * 9 // 10

    again = await gateway.ask("again", text=PROMPT, sampling=GREEDY)
    assert again.ids == answer.ids


def _disturb(resume: pb.Resume, rng: random.Random) -> None:
    ids = [rng.choice((0, 1, 2, 300, 1_999, 10**5, -1, 2**31 - 1)) for _ in range(rng.randrange(4))]
    match rng.randrange(6):
        case 0:
            resume.output_ids.extend(ids)
        case 1:
            resume.max_tokens = rng.choice((-1, 0, 1, 50, MAX_MODEL_LEN, 2**31 - 1))
        case 2:
            resume.num_delivered_tokens = rng.choice((-1, 0, 49, 2**31 - 1))
        case 3:
            resume.last_due_age_s = rng.choice((float("nan"), -1e6, 1e6, 1e300))
        case 4:
            resume.arrived_age_s = rng.choice((float("inf"), -1.0, 1e6, 0.0))
        case 5:
            resume.prompt_digest = rng.choice((0, 1, 2**64 - 1))
