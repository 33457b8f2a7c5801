"""TLS by settings: services show each other certificates, and talk to nobody who has none."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.app import run_gateway
from services.kit.rpc import make_blocking_channel, make_channel
from services.kit.server import ServiceServer
from services.kit.transport import Certificates, Transport
from tests.certificates import Authority
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor
from tests.gateways import chat_body, make_settings, until
from tests.probing import probed

REFUSED = grpc.StatusCode.UNAVAILABLE
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
async def server(authority: Authority) -> AsyncIterator[ServiceServer]:
    transport = Transport(certificates=authority.issue("server"))
    server = ServiceServer("127.0.0.1:0", [], transport=transport)
    await server.start()
    await server.mark_serving()
    yield server
    await server.drain(0)


def trusting(authority: Authority) -> grpc.ChannelCredentials:
    """Return credentials of a client that has no certificate."""
    return grpc.ssl_channel_credentials(Path(authority.ca_file).read_bytes())


async def status_of(channel: aio.Channel) -> Any:
    """Return the health that a channel's peer reports, or the code that the call fails with."""
    async with channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=EVENT_TIMEOUT_S
            )
        except aio.AioRpcError as error:
            return error.code()
    return answer.status


async def test_a_client_with_a_certificate_of_the_ca_is_served(server, authority) -> None:
    transport = Transport(certificates=authority.issue("client"))

    assert await status_of(make_channel(f"127.0.0.1:{server.port}", transport=transport)) == SERVING


async def test_a_client_without_a_certificate_is_refused(server, authority) -> None:
    channel = aio.secure_channel(f"127.0.0.1:{server.port}", trusting(authority))

    assert await status_of(channel) == REFUSED


async def test_a_client_of_another_ca_is_refused(server, authority, tmp_path) -> None:
    strange = Authority(tmp_path / "theirs").issue("client")
    transport = Transport(certificates=replace(strange, ca_file=authority.ca_file))

    assert await status_of(make_channel(f"127.0.0.1:{server.port}", transport=transport)) == REFUSED


async def test_a_client_in_plain_text_is_refused(server) -> None:
    assert await status_of(make_channel(f"127.0.0.1:{server.port}")) == REFUSED


async def test_a_server_of_another_ca_is_not_trusted(server, authority, tmp_path) -> None:
    theirs = Authority(tmp_path / "theirs")
    transport = Transport(certificates=replace(authority.issue("client"), ca_file=theirs.ca_file))

    assert await status_of(make_channel(f"127.0.0.1:{server.port}", transport=transport)) == REFUSED


async def test_a_server_shows_and_asks_for_what_its_files_hold_now(
    server, authority, tmp_path
) -> None:
    address = f"127.0.0.1:{server.port}"
    mine = authority.issue("client")
    mine_still = replace(mine, ca_file=shutil.copy(authority.ca_file, tmp_path / "old-ca.pem"))
    old = Transport(certificates=mine_still)
    newer = Authority(tmp_path / "newer")
    new = Transport(certificates=newer.issue("client"))
    assert await status_of(make_channel(address, transport=new)) == REFUSED
    shown, files = newer.issue("server"), authority.files("server")
    for kind in ("key_file", "cert_file", "ca_file"):
        shutil.copy(getattr(shown, kind), getattr(files, kind))

    assert await status_of(make_channel(address, transport=new)) == SERVING
    assert await status_of(make_channel(address, transport=old)) == REFUSED

    shutil.move(files.cert_file, tmp_path / "away")
    assert await status_of(make_channel(address, transport=new)) == SERVING


async def answer_of(stub: health_pb2_grpc.HealthStub, *, is_blocking: bool) -> Any:
    """Return the health that a stub's peer reports, or the code that the call fails with."""
    request, timeout_s = health_pb2.HealthCheckRequest(), EVENT_TIMEOUT_S
    try:
        if is_blocking:
            return (await asyncio.to_thread(stub.Check, request, timeout=timeout_s)).status
        return (await stub.Check(request, timeout=timeout_s)).status
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined]  # calls that fail are errors with codes


@pytest.mark.parametrize("make", [make_channel, make_blocking_channel])
async def test_a_client_shows_and_trusts_what_its_files_hold_now(
    server, authority, tmp_path, make
) -> None:
    """Its stub is as old as the process; a file that is away for a moment changes nothing."""
    newer = Authority(tmp_path / "newer")
    address, mine = f"127.0.0.1:{server.port}", authority.issue("client")
    channel = make(address, transport=Transport(certificates=mine))
    stub, is_blocking = health_pb2_grpc.HealthStub(channel), make is make_blocking_channel
    answers = [await answer_of(stub, is_blocking=is_blocking)]

    await server.drain(0)
    transport = Transport(certificates=newer.issue("server"))
    renewed = ServiceServer(address, [], transport=transport)
    await renewed.start()
    await renewed.mark_serving()
    answers.append(await answer_of(stub, is_blocking=is_blocking))
    shutil.move(mine.cert_file, tmp_path / "away")
    answers.append(await answer_of(stub, is_blocking=is_blocking))
    shown = newer.issue("client")
    for kind in ("key_file", "cert_file", "ca_file"):
        shutil.copy(getattr(shown, kind), getattr(mine, kind))

    assert answers == [SERVING, REFUSED, REFUSED]
    async with asyncio.timeout(EVENT_TIMEOUT_S):  # a handshake may take too long
        while await answer_of(stub, is_blocking=is_blocking) != SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    closing = channel.close()
    if not is_blocking:
        await closing
    await renewed.drain(0)


async def test_only_services_with_a_listed_name_may_call(authority) -> None:
    names = frozenset({"gateway", "planner"})
    transport = Transport(certificates=authority.issue("executor"), client_names=names)
    executor = ServiceServer("127.0.0.1:0", [], transport=transport)
    reached = grpc.unary_unary_rpc_method_handler(answer_nothing)
    executor.grpc.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Service", {"Call": reached})]
    )
    await executor.start()

    async def code_of(*services: str) -> Any:
        mine = Transport(certificates=authority.issue("client", *services))
        async with make_channel(f"127.0.0.1:{executor.port}", transport=mine) as channel:
            try:
                await channel.unary_unary("/test.Service/Call")(b"", timeout=EVENT_TIMEOUT_S)
            except aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    callers = [("gateway",), ("tracker", "planner"), ("tracker",), ()]
    codes = [await code_of(*services) for services in callers]
    await executor.drain(0)

    assert [code.name for code in codes] == ["OK", "OK", "UNAUTHENTICATED", "UNAUTHENTICATED"]


async def answer_nothing(request: bytes, context: Any) -> bytes:
    return b""


async def test_the_probe_takes_certificates(server, authority) -> None:
    mine = authority.issue("probe")
    address = f"localhost:{server.port}"
    files = ("--ca", mine.ca_file, "--cert", mine.cert_file, "--key", mine.key_file)

    assert await probed(address, *files) == (0, "")
    assert (await probed(address))[0] == 1


@pytest.fixture
async def executor(authority: Authority) -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor(certificates=authority.issue("executor"))
    await executor.start()
    yield executor
    await executor.kill()


def links(mine: Certificates) -> dict[str, object]:
    """Return the settings that make the gateway's links to services use TLS."""
    return {
        "tls_cert_file": mine.cert_file,
        "tls_key_file": mine.key_file,
        "tls_ca_file": mine.ca_file,
    }


async def test_a_gateway_with_certificates_serves_https_through_a_secured_link(
    executor: FakeExecutor, authority: Authority
) -> None:
    edge = authority.issue("edge")
    settings = make_settings(
        executor,
        edge_cert_file=edge.cert_file,
        edge_key_file=edge.key_file,
        **links(authority.issue("gateway")),
    )
    async with run_gateway(settings) as gateway:
        await until(lambda: gateway.dispatcher.is_ready)
        context = ssl.create_default_context(cafile=authority.ca_file)
        address = f"127.0.0.1:{gateway.http_port}"
        async with httpx.AsyncClient(verify=context, timeout=EVENT_TIMEOUT_S) as client:
            answer = await client.post(f"https://{address}/v1/chat/completions", json=chat_body())
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://{address}/health")
        channel = aio.secure_channel(f"127.0.0.1:{gateway.grpc_port}", trusting(authority))
        over_grpc = await status_of(channel)

    assert answer.status_code == 200
    assert answer.json()["model"] == MODEL
    assert over_grpc == SERVING


async def test_https_shows_and_asks_for_what_its_files_hold_now(
    executor: FakeExecutor, authority: Authority, tmp_path: Path
) -> None:
    edge, newer = authority.issue("edge"), Authority(tmp_path / "newer")
    settings = make_settings(
        executor,
        edge_cert_file=edge.cert_file,
        edge_key_file=edge.key_file,
        edge_ca_file=edge.ca_file,
    )

    async def is_served(trusted: str, shown: Certificates) -> bool:
        context = ssl.create_default_context(cafile=trusted)
        context.load_cert_chain(shown.cert_file, shown.key_file)
        async with httpx.AsyncClient(verify=context, timeout=EVENT_TIMEOUT_S) as client:
            try:
                url = f"https://127.0.0.1:{gateway.http_port}/health"
                return (await client.get(url)).status_code == 200
            except httpx.HTTPError:
                return False

    old, new = authority.issue("old-client"), newer.issue("new-client")
    old_ca = str(shutil.copy(authority.ca_file, tmp_path / "old-ca.pem"))
    async with run_gateway(settings) as gateway:
        before = [await is_served(old_ca, old), await is_served(newer.ca_file, new)]
        shown = newer.issue("edge")
        for kind in ("key_file", "cert_file", "ca_file"):
            shutil.copy(getattr(shown, kind), getattr(edge, kind))
        after = [await is_served(old_ca, old), await is_served(newer.ca_file, new)]
        shutil.move(edge.cert_file, tmp_path / "away")
        without = await is_served(newer.ca_file, new)

    assert (before, after, without) == ([True, False], [False, True], True)


async def test_a_gateway_without_a_certificate_gets_no_executor(executor: FakeExecutor) -> None:
    async with (
        run_gateway(make_settings(executor)) as gateway,
        httpx.AsyncClient(timeout=EVENT_TIMEOUT_S) as client,
    ):
        url = f"http://127.0.0.1:{gateway.http_port}/v1/chat/completions"
        answer = await client.post(url, json=chat_body())

    assert answer.status_code == 503
    assert executor.gateway_ids == []


async def test_an_edge_with_a_ca_refuses_clients_without_a_certificate(
    executor: FakeExecutor, authority: Authority
) -> None:
    edge, mine = authority.issue("edge"), authority.issue("client")
    settings = make_settings(
        executor,
        edge_cert_file=edge.cert_file,
        edge_key_file=edge.key_file,
        edge_ca_file=edge.ca_file,
    )
    async with run_gateway(settings) as gateway:
        url = f"https://127.0.0.1:{gateway.http_port}/health"
        context = ssl.create_default_context(cafile=authority.ca_file)
        async with httpx.AsyncClient(verify=context, timeout=EVENT_TIMEOUT_S) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(url)
        context.load_cert_chain(mine.cert_file, mine.key_file)
        async with httpx.AsyncClient(verify=context, timeout=EVENT_TIMEOUT_S) as client:
            answer = await client.get(url)

    assert answer.status_code == 200
