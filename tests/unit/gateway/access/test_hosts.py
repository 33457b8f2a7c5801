"""Under which names a gateway may be called."""

import pytest

from services.gateway.access.hosts import ANY_HOST, Hosts, is_loopback
from services.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("name", "leads_here"),
    [
        ("localhost", True),
        ("a.b.localhost", True),
        ("127.255.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("128.0.0.1", False),
        ("xlocalhost", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
    ],
)
def test_which_names_lead_to_this_machine_alone(name: str, leads_here: bool) -> None:
    assert is_loopback(name) is leads_here


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("llm.example", True),
        ("LLM.example.:80", True),
        ("a.team.example:8000", True),
        ("b.a.team.example", True),
        ("team.example", False),
        ("ateam.example", False),
        ("llm.example.evil", False),
        ("llm.example:80:80", False),
        ("llm.example:x", False),
        ("[fe80::1]:80", True),
        ("[fe80::2]", True),
        ("10.0.0.7:8000", True),
        ("10.0.0.7.example", False),
        ("gateway:8000", True),
        ("localhost:1", True),
        ("[::1", False),
        ("user@llm.example", False),
        ("", True),
    ],
)
def test_a_host_is_one_that_no_page_can_own_or_one_of_the_names_given(
    host: str, is_one: bool
) -> None:
    hosts = Hosts(["llm.Example", "*.team.example", "[fe80::1]", ""])

    assert hosts.admit(host) is is_one
    assert ANY_HOST.admit(host)


@pytest.mark.parametrize("value", ["a:80", "http://a", "a b", "a,", "*a", "[x]", "*.*"])
def test_what_is_no_name_of_a_host_stops_the_start(monkeypatch, value: str) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_ALLOWED_HOSTS", value)

    with pytest.raises(ValueError, match="allowed_hosts"):
        GatewaySettings()


def test_names_of_hosts_are_listed_with_commas(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_ALLOWED_HOSTS", "a.example, *.b.example,[::2]")

    hosts = GatewaySettings().hosts

    assert [hosts.admit(host) for host in ("a.example", "x.b.example", "[::2]:1", "c.example")] == [
        *[True] * 3,
        False,
    ]
