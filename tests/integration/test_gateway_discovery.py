"""Executors that come and go behind a name: real servers on several loopback addresses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
import structlog

from services.gateway.app import run_gateway
from services.gateway.executors.discovery import resolve
from services.gateway.executors.fleet import contradictions
from services.gateway.settings import GatewaySettings
from services.kit.errors import UnavailableError
from tests.certificates import Authority
from tests.fake_executor import FINGERPRINT, FakeExecutor, Script
from tests.gateways import Client, chat_body, connect, make_settings, started, stream_body, until

URL = "/v1/chat/completions"
NAME = "executors.test"
SERVED = 200


class Names:
    """What names stand for, in place of the system's resolver. A problem is raised."""

    def __init__(self) -> None:
        self.found: Collection[str] | UnavailableError = ()
        self.num_asked = 0

    async def resolve(self, host: str, port: int) -> Collection[str]:
        assert host == NAME
        self.num_asked += 1
        if isinstance(self.found, UnavailableError):
            raise self.found
        return [f"{found}:{port}" for found in self.found]

    async def asked_again(self) -> None:
        """Wait until the gateway has acted on an answer that it asked for after this call."""
        before = self.num_asked
        await until(lambda: self.num_asked >= before + 3)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr("services.gateway.executors.discovery.resolve", names.resolve)
    monkeypatch.setattr("services.gateway.executors.fleet.LOOK_INTERVAL_S", 0.01)
    return names


@pytest.fixture
async def executors() -> AsyncIterator[list[FakeExecutor]]:
    """Three executors, at 127.0.0.2 to 127.0.0.4 on one port."""
    first = FakeExecutor(executor_id="e2", host="127.0.0.2", fingerprint=FINGERPRINT)
    made = [first] + [
        FakeExecutor(
            executor_id=f"e{k}", host=f"127.0.0.{k}", port=first.port, fingerprint=FINGERPRINT
        )
        for k in (3, 4)
    ]
    async with started(*made):
        yield made


@pytest.fixture
async def client(names: Names, executors: list[FakeExecutor]) -> AsyncIterator[Client]:
    settings = make_settings(executors=f"dns:{NAME}:{executors[0].port}")
    async with run_gateway(settings) as gateway, connect(gateway) as client:
        yield client


def links_of(client: Client) -> set[str]:
    """Return the hosts of all links."""
    return {address.partition(":")[0] for address in client.gateway.dispatcher.placing._links}


async def are_ready(client: Client, *hosts: str) -> None:
    def ready() -> bool:
        candidates = client.gateway.dispatcher.placing._candidates()
        return {one.address.partition(":")[0] for one in candidates} == set(hosts)

    await until(ready)


async def ask(client: Client, num_times: int) -> list[int]:
    answers = [await client.http.post(URL, json=chat_body()) for _ in range(num_times)]
    return [answer.status_code for answer in answers]


def num_submits(executors: list[FakeExecutor]) -> list[int]:
    return [len(executor.submits) for executor in executors]


@pytest.mark.logs("executors_found", "executor_gone")
async def test_links_follow_a_name_while_requests_run(client, names, executors) -> None:
    names.found = ["127.0.0.2", "127.0.0.3"]
    await are_ready(client, "127.0.0.2", "127.0.0.3")
    held = Script()
    held.ending.clear()
    for executor in executors[:2]:
        executor.script = held
    streams = [asyncio.create_task(client.http.post(URL, json=stream_body())) for _ in range(2)]
    await until(lambda: client.num_generated() == [3, 3])
    assert num_submits(executors) == [1, 1, 0]

    names.found = ["127.0.0.3", "127.0.0.4"]
    await are_ready(client, "127.0.0.3", "127.0.0.4")
    for executor in executors:
        executor.script = Script()
    assert await ask(client, 4) == [SERVED] * 4
    assert len(executors[0].submits) == 1
    assert num_submits(executors)[2] > 0
    assert links_of(client) == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}

    held.ending.set()
    answers = await asyncio.gather(*streams)

    assert ["[DONE]" in answer.text for answer in answers] == [True, True]
    await until(lambda: "127.0.0.2" not in links_of(client))
    assert not any(executor.aborted for executor in executors)


async def test_what_ran_at_an_executor_that_is_gone_and_dies_moves(
    client, names, executors
) -> None:
    for executor in executors:
        executor.script = Script(texts=["x"] * 40)
        executor.script.midway.clear()
    names.found = ["127.0.0.2"]
    await are_ready(client, "127.0.0.2")
    stream = asyncio.create_task(client.http.post(URL, json=stream_body()))
    await until(lambda: client.num_generated() == [20])

    names.found = ["127.0.0.3"]
    await are_ready(client, "127.0.0.3")
    for executor in executors:
        executor.script.midway.set()
    await executors[0].kill()
    answer = await stream

    assert answer.text.count('"x"') == 40
    assert num_submits(executors) == [1, 1, 0]
    await until(lambda: links_of(client) == {"127.0.0.3"})


async def test_an_address_that_comes_back_while_its_requests_run_is_the_same_executor(
    client, names, executors
) -> None:
    names.found = ["127.0.0.2"]
    await are_ready(client, "127.0.0.2")
    executors[0].script.ending.clear()
    stream = asyncio.create_task(client.http.post(URL, json=stream_body()))
    await until(lambda: client.num_generated() == [3])
    names.found = []
    await are_ready(client)
    names.found = ["127.0.0.2"]
    await are_ready(client, "127.0.0.2")
    executors[0].script.ending.set()

    assert "[DONE]" in (await stream).text
    assert len(executors[0].gateway_ids) == 1


async def test_a_name_that_is_none_keeps_a_gateway_waiting_and_is_logged_once(
    client, names, executors
) -> None:
    with structlog.testing.capture_logs() as logs:
        names.found = UnavailableError("no answer")
        await names.asked_again()
        assert (await client.http.get("/ready")).status_code == 503
        assert (await client.http.get("/health")).status_code == SERVED
        names.found = ()
        await names.asked_again()
        names.found = ["127.0.0.2"]
        await client.wait_ready()

    told = [(entry["event"], entry.get("detail")) for entry in logs if "source" in entry]
    assert told == [
        ("executors_not_found", "no answer"),
        ("executors_not_found", "none is there"),
        ("executors_found", None),
    ]


@pytest.mark.logs("executors_not_found")
async def test_while_a_name_is_not_answered_its_links_stay(client, names, executors) -> None:
    names.found = ["127.0.0.2"]
    await are_ready(client, "127.0.0.2")
    names.found = UnavailableError("no answer")
    await names.asked_again()

    assert await ask(client, 2) == [SERVED] * 2
    assert len(executors[0].gateway_ids) == 1


@pytest.mark.logs("executors_contradict")
@pytest.mark.parametrize("differ", ["fingerprint", "executor_id"])
async def test_executors_that_contradict_each_other_serve_and_are_named(
    client, names, executors, differ
) -> None:
    first, second = executors[:2]
    if differ == "fingerprint":
        second.fingerprint = "another"
    else:
        second.executor_id = first.executor_id
    names.found = ["127.0.0.2", "127.0.0.3"]
    await are_ready(client, "127.0.0.2", "127.0.0.3")
    await names.asked_again()

    assert await ask(client, 4) == [SERVED] * 4
    assert num_submits(executors) == [2, 2, 0]
    ((one, other, differs),) = contradictions(client.gateway.dispatcher.placing._links.values())
    assert (one, other) == (first.address, second.address)
    assert ("another" if differ == "fingerprint" else "e2") in differs


async def test_stated_addresses_and_names_go_together(names, executors) -> None:
    names.found = ["127.0.0.3", "127.0.0.4"]
    both = f"{executors[0].address},dns:{NAME}:{executors[0].port}"
    settings = make_settings(executors=both)
    async with run_gateway(settings) as gateway, connect(gateway) as client:
        await are_ready(client, "127.0.0.2", "127.0.0.3", "127.0.0.4")
        assert await ask(client, 3) == [SERVED] * 3

    assert num_submits(executors) == [1, 1, 1]


@pytest.mark.parametrize(("server", "is_trusted"), [(NAME, True), ("other.test", False)])
async def test_an_executor_behind_a_name_shows_a_certificate_of_that_name(
    names: Names, tmp_path: Path, server: str, is_trusted: bool
) -> None:
    authority = Authority(tmp_path)
    certificates = authority.issue("executor", server)
    own = authority.issue("gateway")
    executor = FakeExecutor(host="127.0.0.2", certificates=certificates)
    tls = {"tls_cert_file": own.cert_file, "tls_key_file": own.key_file, "tls_ca_file": own.ca_file}
    settings = make_settings(executors=f"dns:{NAME}:{executor.port}", **tls)
    names.found = ["127.0.0.2"]
    async with started(executor), run_gateway(settings) as gateway:
        if is_trusted:
            await until(lambda: gateway.dispatcher.is_ready)
        else:
            await names.asked_again()
            assert not executor.gateway_ids


# -- the system's resolver -----------------------------------------------------------------------


async def test_a_name_s_addresses_are_of_one_family() -> None:
    found = await resolve("localhost", 50051)

    assert found in ({"127.0.0.1:50051"}, {"[::1]:50051"})


@pytest.mark.parametrize(
    ("code", "is_none"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)]
)
async def test_no_such_name_is_told_from_no_answer(
    monkeypatch: pytest.MonkeyPatch, code: int, is_none: bool
) -> None:
    async def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(code, "by the test")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    if is_none:
        assert not await resolve("nowhere.test", 1)
    else:
        with pytest.raises(UnavailableError, match="by the test"):
            await resolve("nowhere.test", 1)


@pytest.mark.parametrize("value", ["dns:", "dns:name", "dns:name:99999", "dns::50051"])
def test_a_name_without_a_port_stops_the_start(value: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        GatewaySettings.model_validate({"executors": value})
