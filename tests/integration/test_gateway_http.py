"""The HTTP edge over real sockets, with a scripted executor behind it."""

import asyncio
import json
import re
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.rpc import name_of_request
from tests.fake_executor import MODEL, NUM_PROMPT_TOKENS, FakeExecutor, Script
from tests.gateways import JSON, chat_body, gateway_for, stream_body, until


def error_of(response: httpx.Response) -> dict[str, object]:
    """Return the error, having checked that the body is nothing but one in OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


def chat_chunk(response_id: str, created: int, choices: str, usage: str) -> str:
    return (
        f'data: {{"id":"{response_id}","object":"chat.completion.chunk","created":{created},'
        f'"model":"{MODEL}","choices":[{choices}]{usage}}}\n\n'
    )


def chat_choice(delta: str, reason: str = "null") -> str:
    return f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'


async def test_a_chat_stream_is_openai_s_byte_by_byte(client, executor) -> None:
    executor.script = Script(texts=["Hi", "", ' "you"\n'])  # the token without text has no event

    response = await client.http.post(
        "/v1/chat/completions", json=stream_body(), headers={"x-request-id": "r1"}
    )

    created = json.loads(response.text.split("\n")[0][6:])["created"]
    choices = [
        chat_choice('{"role":"assistant","content":""}'),
        chat_choice('{"content":"Hi"}'),
        chat_choice('{"content":" \\"you\\"\\n"}'),
        chat_choice("{}", '"stop"'),
    ]
    expected = [chat_chunk("chatcmpl-r1", created, choice, "") for choice in choices]
    assert response.content.decode() == "".join(expected) + "data: [DONE]\n\n"
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "r1"


async def test_usage_comes_in_a_chunk_of_its_own(client, executor) -> None:
    executor.script = Script(texts=["Hi"], finish_reason=gen.FINISH_REASON_LENGTH)

    response = await client.http.post(
        "/v1/chat/completions",
        json=stream_body(stream_options={"include_usage": True}),
        headers={"x-request-id": "r1"},
    )

    created = json.loads(response.text.split("\n")[0][6:])["created"]
    no_usage = ',"usage":null'
    usage = (
        ',"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8,'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )
    assert response.text == "".join(
        [
            chat_chunk(
                "chatcmpl-r1",
                created,
                chat_choice('{"role":"assistant","content":""}'),
                no_usage,
            ),
            chat_chunk("chatcmpl-r1", created, chat_choice('{"content":"Hi"}'), no_usage),
            chat_chunk("chatcmpl-r1", created, chat_choice("{}", '"length"'), no_usage),
            chat_chunk("chatcmpl-r1", created, "", usage),
            "data: [DONE]\n\n",
        ]
    )


async def test_a_completion_stream_is_openai_s_byte_by_byte(client, executor) -> None:
    executor.script = Script(texts=["a"])

    response = await client.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": [1, 2, 3], "stream": True},
        headers={"x-request-id": "r1"},
    )

    created = json.loads(response.text.split("\n")[0][6:])["created"]
    head = (
        f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},'
        f'"model":"{MODEL}","choices":[{{"index":0,"text":'
    )
    assert response.text == (
        f'{head}"a","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert list(executor.submits[0].token_ids.ids) == [1, 2, 3]


async def test_a_whole_chat_answer_has_its_text_and_usage(client, executor) -> None:
    response = await client.http.post(
        "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "r1"}
    )

    body = response.json()
    created = body.pop("created")
    assert isinstance(created, int)
    assert body == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "completion_tokens": 3,
            "total_tokens": NUM_PROMPT_TOKENS + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_every_parameter_reaches_the_executor(client, executor) -> None:
    await client.http.post(
        "/v1/chat/completions",
        json=chat_body(
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "Be"}] * 2},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "Hi"},
            ],
            max_completion_tokens=9,
            temperature=0.5,
            top_p=0.25,
            stop=["a", "b"],
            seed=-3,
            evenflow={"slo_tbt_ms": 250, "pace_tail": True},
        ),
        headers={
            "x-request-id": "r1",
            "x-slo-ttft-ms": "1500",
            "x-slo-tpot-ms": "100",
            "x-slo-tbt-ms": "1",  # the body says otherwise
            "x-consumption-rate-tps": "8",  # of what comes whole nothing is read before its end
        },
    )

    assert abs(executor.submits[0].rendered_at_s - time.time()) < 600
    assert executor.submits == [
        executor_pb2.Submit(
            request_id=executor.submits[0].request_id,  # nobody else's
            rendered_at_s=executor.submits[0].rendered_at_s,
            generation=1,
            fair_key="127.0.0.1",
            holder=executor_pb2.Holder(request_class="paced"),
            model=MODEL,
            chat=executor_pb2.Chat(
                messages=[
                    gen.ChatMessage(role="system", content="BeBe"),
                    gen.ChatMessage(role="assistant"),
                    gen.ChatMessage(role="user", content="Hi"),
                ]
            ),
            sampling=gen.SamplingParams(
                max_tokens=9, temperature=0.5, top_p=0.25, stop=["a", "b"], seed=-3
            ),
            service_level=gen.ServiceLevel(
                slo_ttft_s=1.5,
                slo_tpot_s=0.1,
                slo_tbt_s=0.25,
                pace_tail=True,
            ),
        )
    ]


TEXTS = ["naïve ", "日本語", "🙂", "\u2028", "\u0085", "</s>\r\n\t\x00"]


@pytest.mark.parametrize("stream", [True, False])
async def test_text_of_any_script_survives(client, executor, stream) -> None:
    executor.script = Script(texts=TEXTS)

    response = await client.http.post("/v1/chat/completions", json=chat_body(stream=stream))

    if stream:
        # httpx ends lines at every Unicode line end: none may be left raw inside an event.
        events = [line[6:] for line in response.iter_lines() if line]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    else:
        texts = [response.json()["choices"][0]["message"]["content"]]
    assert "".join(texts) == "".join(TEXTS)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, None),
        ("POST", "/v1/models", 405, None),
        ("GET", "/v1/models/no-such-model", 404, "model_not_found"),
    ],
)
async def test_errors_of_the_router_have_openai_s_shape(client, method, path, status, code) -> None:
    response = await client.http.request(method, path)

    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("declares_length", [True, False])
async def test_a_body_above_the_limit_is_a_413(client, declares_length) -> None:
    content = b" " * ((1 << 20) + 1)  # 16 B for each of 4096 tokens are less than 1 MiB

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    response = await client.http.post(
        "/v1/chat/completions", content=content if declares_length else chunks(), headers=JSON
    )

    assert response.status_code == 413
    error = error_of(response)
    assert (error["param"], error["code"]) == (None, "request_too_large")


async def test_the_body_limit_grows_with_the_context_length() -> None:
    executor = FakeExecutor(max_model_len=131_072)  # x 16 B = 2 MiB
    await executor.start()
    async with gateway_for(executor) as client:
        await client.wait_ready()
        at_limit = chat_body(messages=[{"role": "user", "content": "x" * (3 << 19)}])  # 1.5 MiB

        response = await client.http.post("/v1/chat/completions", json=at_limit)

    await executor.kill()
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("reject", "status", "code", "param"),
    [
        pytest.param(
            executor_pb2.Rejected(
                code=executor_pb2.REJECT_CODE_INVALID_ARGUMENT, field="temperature", message="no"
            ),
            400,
            "invalid_request",
            "temperature",
            id="invalid",
        ),
        pytest.param(
            executor_pb2.Rejected(
                code=executor_pb2.REJECT_CODE_CONTEXT_LENGTH, field="messages", message="no"
            ),
            400,
            "context_length_exceeded",
            "messages",
            id="context-length",
        ),
        pytest.param(
            executor_pb2.Rejected(code=executor_pb2.REJECT_CODE_UNKNOWN_MODEL, message="no"),
            404,
            "model_not_found",
            "model",
            id="unknown-model",
        ),
        pytest.param(
            executor_pb2.Rejected(code=executor_pb2.REJECT_CODE_OVERLOADED, message="no"),
            429,
            "overloaded",
            None,
            id="overloaded",
        ),
        pytest.param(
            executor_pb2.Rejected(code=executor_pb2.REJECT_CODE_UNAVAILABLE, message="no"),
            503,
            "unavailable",
            None,
            id="unavailable",
        ),
        pytest.param(
            executor_pb2.Rejected(code=77, message="no"), 500, "generation_failed", None, id="new"
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_executor_refuses_is_a_status_not_an_event(
    client, executor, stream, reject, status, code, param
) -> None:
    executor.script = Script(reject=reject)

    response = await client.http.post("/v1/chat/completions", json=chat_body(stream=stream))

    assert response.status_code == status
    assert error_of(response) | {"type": ""} == {
        "message": "no",
        "type": "",
        "param": param,
        "code": code,
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"logit_bias": {"300": 5.0}}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_an_executor_that_drafts_cannot_do_is_a_400_that_names_the_field(
    client, executor, path, asked
) -> None:
    (field,) = asked
    reject = executor_pb2.Rejected(
        code=executor_pb2.REJECT_CODE_INVALID_ARGUMENT,
        field=field,
        message=f"{field}: not with speculative decoding, which the model is served with",
    )
    executor.script_for = lambda submit: Script(
        reject=reject if submit.sampling.min_p or submit.sampling.logit_bias else None
    )
    body = chat_body() if "chat" in path else {"model": MODEL, "prompt": "Hi"}

    plain = await client.http.post(path, json=body)
    refused = await client.http.post(path, json=body | asked)

    assert plain.status_code == 200
    assert refused.status_code == 400
    assert error_of(refused)["param"] == field
    assert "speculative decoding" in error_of(refused)["message"]


async def test_an_unknown_model_is_a_404_without_asking_the_executor(client, executor) -> None:
    response = await client.http.post("/v1/chat/completions", json=chat_body(model="other"))

    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert executor.submits == []


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (executor_pb2.Failure(retryable=True, message="lost a rank"), "engine_failed"),
        (executor_pb2.Failure(retryable=False, message="bad grammar"), "generation_failed"),
    ],
)
@pytest.mark.logs("stream_failed")
async def test_a_failure_after_the_first_byte_is_the_last_event(
    client, executor, failure, code
) -> None:
    executor.script = Script(texts=["Hi"], failure=failure)

    response = await client.http.post("/v1/chat/completions", json=stream_body())

    events = response.text.strip().split("\n\n")
    assert response.status_code == 200
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["message"].partition(";")[0], error["code"]) == (failure.message, code)
    assert "Hi" in events[-2]
    assert "[DONE]" not in response.text


async def test_a_failure_of_a_whole_answer_is_a_status(client, executor) -> None:
    executor.script = Script(failure=executor_pb2.Failure(message="bad grammar"))

    response = await client.http.post("/v1/chat/completions", json=chat_body())

    assert response.status_code == 500
    assert error_of(response)["message"] == "bad grammar"


async def test_what_an_engine_gives_up_on_twice_is_asked_no_third_time(client, executor) -> None:
    executor.script = Script(failure=executor_pb2.Failure(retryable=True, message="lost a rank"))

    response = await client.http.post("/v1/chat/completions", json=chat_body())

    assert response.status_code == 500
    assert error_of(response)["code"] == "generation_failed"
    assert len(executor.submits) == 2


async def test_the_request_id_is_the_client_s_if_it_is_valid(client, executor) -> None:
    ids = ["a.valid:id-1", "not valid", "x" * 129]
    responses = [
        await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": request_id}
        )
        for request_id in ids
    ]

    returned = [response.headers["x-request-id"] for response in responses]
    assert returned[0] == ids[0]
    assert all(re.fullmatch("req-[0-9a-f]{32}", request_id) for request_id in returned[1:])
    assert [name_of_request(submit.request_id) for submit in executor.submits] == returned


async def test_requests_of_one_name_are_answered_side_by_side(client, executor) -> None:
    executor.script = Script()
    executor.script.ending.clear()
    headers = {"x-request-id": "x" * 128}  # executors take no more characters
    async with client.http.stream(
        "POST", "/v1/chat/completions", json=stream_body(), headers=headers
    ) as first:
        executor.script = Script()
        second = await client.http.post("/v1/chat/completions", json=chat_body(), headers=headers)
    assert (first.status_code, second.status_code) == (200, 200)
    first_id, second_id = (submit.request_id for submit in executor.submits)
    assert first_id != second_id
    assert len(first_id) == len(second_id) == 128


async def test_models_are_listed_and_found_by_ids_with_slashes() -> None:
    executors = [FakeExecutor(model="org/b", max_model_len=512), FakeExecutor(model="a")]
    for executor in executors:
        await executor.start()
    async with gateway_for(*executors) as client:
        await until(lambda: len(client.gateway.dispatcher.models()) == 2)
        listed = (await client.http.get("/v1/models")).json()
        one = (await client.http.get("/v1/models/org/b")).json()
    for executor in executors:
        await executor.kill()

    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["a", "org/b"]
    assert one == listed["data"][1]
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "evenflow", 512)
    assert (one["root"], one["parent"]) == ("org/b", None)


async def test_an_adapter_is_a_model_of_its_own_where_it_is_served() -> None:
    tuned = executor_pb2.Adapter(model="tuned", root="/adapters/tuned")
    adapted = FakeExecutor(root="org/base", adapters=[tuned])
    plain = FakeExecutor(executor_id="executor-1", root="org/base")
    for executor in (adapted, plain):
        await executor.start()
    async with gateway_for(adapted, plain) as client:
        await until(lambda: all(one.session is not None for one in (adapted, plain)))
        answers = [
            await client.http.post("/v1/chat/completions", json=chat_body(model=model))
            for model in ("tuned", "tuned", "tuned", "other")
        ]
        listed = (await client.http.get("/v1/models")).json()["data"]
        one = (await client.http.get("/v1/models/tuned")).json()
    for executor in (adapted, plain):
        await executor.kill()

    assert [answer.status_code for answer in answers] == [200, 200, 200, 404]
    assert [answer.json().get("model") for answer in answers[:3]] == ["tuned"] * 3
    assert answers[3].json()["error"]["code"] == "model_not_found"
    assert ([submit.model for submit in adapted.submits], plain.submits) == (["tuned"] * 3, [])
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        (MODEL, "org/base", None),
        ("tuned", "/adapters/tuned", MODEL),
    ]
    assert one == listed[1]


async def test_what_vllm_s_server_tells_of_itself_is_told(client, executor) -> None:
    executor.script = Script(generating=asyncio.Event())
    answering = asyncio.create_task(client.http.post("/v1/chat/completions", json=chat_body()))
    await executor.until(lambda: bool(executor.submits))
    busy = (await client.http.get("/load")).json()
    executor.script.generating.set()
    await answering
    await client.wait_idle()

    assert (busy, (await client.http.get("/load")).json()) == (
        {"server_load": 1},
        {"server_load": 0},
    )
    assert (await client.http.get("/ping")).status_code == 200
    assert (await client.http.post("/ping")).status_code == 200
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert (await client.http.get("/version")).json() == {"version": project["version"]}


async def test_metrics_and_probes_are_served(client) -> None:
    await client.http.post("/v1/chat/completions", json=stream_body())

    metrics = (await client.http.get("/metrics")).text
    health, ready = await client.http.get("/health"), await client.http.get("/ready")

    assert (health.status_code, ready.status_code) == (200, 200)
    for name in (
        "evenflow_ttft_seconds_count",
        "evenflow_delivered_tbt_seconds_bucket",
        "evenflow_delivered_tokens_total",
        'evenflow_http_request_duration_seconds_count{route="/v1/chat/completions",status="200"}',
    ):
        assert name in metrics


async def test_the_api_describes_itself(client) -> None:
    document = (await client.http.get("/openapi.json")).json()

    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    named = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][named]["properties"]
    for reference in re.findall(r"#/components/schemas/(\w+)", json.dumps(document)):
        assert reference in document["components"]["schemas"]


async def test_without_an_executor_calls_get_503_and_the_process_is_healthy() -> None:
    nobody = FakeExecutor()
    async with gateway_for(nobody) as client:
        answer = await client.http.post("/v1/chat/completions", json=stream_body())
        ready, health = await client.http.get("/ready"), await client.http.get("/health")
        models = await client.http.get("/v1/models")

    assert (answer.status_code, ready.status_code, health.status_code) == (503, 503, 200)
    assert (error_of(answer)["code"], error_of(ready)["code"]) == ("unavailable", "not_ready")
    assert models.json() == {"object": "list", "data": []}


async def test_above_the_limit_of_live_requests_calls_get_429(executor) -> None:
    executor.script.ending.clear()
    async with gateway_for(executor, max_live_requests=1) as client:
        await client.wait_ready()
        async with client.http.stream("POST", "/v1/chat/completions", json=stream_body()):
            refused = await client.http.post("/v1/chat/completions", json=chat_body())
        await client.wait_idle()
        executor.script.ending.set()
        taken = await client.http.post("/v1/chat/completions", json=chat_body())

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert taken.status_code == 200


async def test_an_executor_that_does_not_answer_in_time_is_a_504(executor) -> None:
    executor.script.accepting.clear()
    async with gateway_for(executor, submit_timeout_s=0.2) as client:
        await client.wait_ready()
        response = await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "slow"}
        )
        await executor.until(lambda: "slow" in executor.aborted)

    assert response.status_code == 504
    assert error_of(response)["type"] == "timeout_error"
