"""What a page in a browser can do with a gateway on its reader's own machine."""

import json

import pytest

from tests.gateways import chat_body, gateway_for

CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
BODY = json.dumps(chat_body()).encode()
PAGE = "https://chat.example"
# What a browser sends to other origins without asking them first.
SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
async def test_a_body_that_is_not_called_json_is_a_415(client, executor, path) -> None:
    for media_type in [*SIMPLE, "text/json", "application/jsonp", "json", "", None]:
        headers = {} if media_type is None else {"content-type": media_type}
        response = await client.http.post(path, content=BODY, headers=headers)

        assert response.status_code == 415
        error = response.json()["error"]
        assert "application/json" in error["message"]
        if path.startswith("/v1/messages"):
            assert error["type"] == "invalid_request_error"
            assert response.json()["type"] == "error"
        else:
            assert error["code"] == "unsupported_media_type"
    assert executor.submits == []


@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/json;charset=UTF-8",
        "application/vnd.api+json",
        "application/problem+json; charset=utf-8",
    ],
)
async def test_a_body_that_is_called_json_is_read(client, media_type) -> None:
    headers = {"content-type": media_type}

    assert (await client.http.post(CHAT, content=BODY, headers=headers)).status_code == 200


LOCAL = ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "127.9.9.9", "[::1]:8000"]
LOCAL += ["[::1]", "app.localhost:80", "localhost.", ""]
STRANGE = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
STRANGE += ["x:y:z", "[", "evil.localhost.example", "10.0.0.1.example"]


async def test_only_names_of_this_machine_reach_a_gateway_that_anybody_on_it_may_call(
    client, executor
) -> None:
    for host in LOCAL:
        response = await client.http.get("/v1/models", headers={"host": host})
        assert response.status_code == 200, host
    for host in STRANGE:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            response = await client.http.get(path, headers={"host": host})
            assert response.status_code == 403, host
            assert response.json()["error"]["code"] == "host_not_allowed"
            assert "EVENFLOW_GATEWAY_ALLOWED_HOSTS" in response.json()["error"]["message"]
        posted = await client.http.post(CHAT, json=chat_body(), headers={"host": host})
        assert posted.status_code == 403
        assert (await client.http.get("/health", headers={"host": host})).status_code == 200
    assert executor.submits == []


async def test_messages_says_in_its_own_shape_that_a_host_is_strange(client) -> None:
    response = await client.http.post("/v1/messages", json={}, headers={"host": "evil.example"})

    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


KEYS = '[[keys]]\nname = "alice"\nkey = "a-good-key-of-thirty-two-characters"\n'
GOOD = {"authorization": "Bearer a-good-key-of-thirty-two-characters"}


@pytest.mark.parametrize(
    ("settings", "asked", "statuses"),
    [
        (
            {"allowed_hosts": "llm.example"},
            ["llm.example:80", "localhost", "x.example"],
            "200 200 403",
        ),
        ({"allowed_hosts": "*.example,b.test"}, ["a.example", "b.test", "c.test"], "200 200 403"),
        ({"allowed_hosts": "*"}, ["a.example", "b.test"], "200 200"),
        ({"published_host": "llm.test", "open": True}, ["llm.test", "evil.example"], "200 403"),
        ({"host": "0.0.0.0", "open": True}, ["llm.example"], "200"),
        ({"host": "0.0.0.0", "published_host": "127.0.0.1"}, ["127.0.0.1", "a.test"], "200 403"),
        (
            {"host": "0.0.0.0", "open": True, "allowed_hosts": "llm.example"},
            ["llm.example", "127.0.0.1", "x.example"],
            "200 200 403",
        ),
        ({"api_keys_file": True}, ["llm.example"], "200"),
        (
            {"api_keys_file": True, "allowed_hosts": "a.example"},
            ["a.example", "b.example"],
            "200 403",
        ),
    ],
)
async def test_which_hosts_are_asked_for_is_a_setting(
    executor, tmp_path, settings, asked, statuses
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    if "api_keys_file" in settings:
        settings = settings | {"api_keys_file": tmp_path / "keys.toml"}
    async with gateway_for(executor, **settings) as client:
        await client.wait_ready()
        told = [
            await client.http.get("/v1/models", headers={"host": host, **GOOD}) for host in asked
        ]

    assert " ".join(str(response.status_code) for response in told) == statuses


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), ("https://other.example", 400)])
async def test_a_page_of_a_listed_origin_alone_may_call_into_a_private_network(
    executor, origin, status
) -> None:
    asks = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
        "access-control-request-private-network": "true",
    }
    async with gateway_for(executor, cors_origins=PAGE) as client:
        await client.wait_ready()
        preflight = await client.http.options(CHAT, headers=asks)

    assert preflight.status_code == status
    allowed = preflight.headers.get("access-control-allow-origin")
    assert allowed == (PAGE if status == 200 else None)
    if status == 200:
        assert preflight.headers["access-control-allow-private-network"] == "true"


async def test_the_page_needs_no_key_and_tells_nothing(executor, tmp_path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with gateway_for(executor, api_keys_file=tmp_path / "keys.toml") as client:
        await client.wait_ready()
        for path in ("/ui", "/ui/", "/ui/ui.js", "/ui/ui.css", "/ui/licences.txt"):
            response = await client.http.get(path)
            assert response.status_code == 200
            assert response.headers["content-security-policy"].startswith("default-src 'none'; ")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "test-model" not in response.text
            assert (await client.http.head(path)).headers["etag"] == response.headers["etag"]
            seen = {"if-none-match": response.headers["etag"]}
            assert (await client.http.get(path, headers=seen)).status_code == 304
        for path in ("/uix", "/v1/models", "/metrics"):
            assert (await client.http.get(path)).status_code == 401
        for path in ("/ui/sources.sha256", "/ui/..%2fpage.py", "/ui/../metrics"):
            assert (await client.http.get(path)).status_code in (401, 404)
        strange = await client.http.get("/ui", headers={"host": "evil.example"})
        assert strange.status_code == 200  # with keys any name may be called


async def test_the_page_answers_to_the_gateway_s_own_names_only_and_can_be_off(executor) -> None:
    async with gateway_for(executor) as client:
        strange = await client.http.get("/ui", headers={"host": "evil.example"})
        assert strange.status_code == 403
    async with gateway_for(executor, ui=False) as client:
        for path in ("/ui", "/ui/ui.js"):
            assert (await client.http.get(path)).status_code == 404
