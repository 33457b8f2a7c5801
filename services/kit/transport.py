"""How processes talk to each other: which certificate each must show, and when a peer is dead."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files, by path. Read when a channel is made, and for each connection to a server; the
    key is kept nowhere else.
    """

    cert_file: str  # own certificate, and those between it and its authority
    key_file: str  # private key of the first of them
    ca_file: str = ""  # authorities whose certificates peers must show; empty: none is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What both ends of a connection agree on."""

    certificates: Certificates | None = None  # None: plain text
    server_name: str = ""  # that a server's certificate must bear; empty: its address' own
    client_names: frozenset[str] = frozenset()  # that a server's clients may bear; empty: any
    keepalive_s: float = 10.0  # between two pings; as long without an answer: the peer is dead
    max_message_bytes: int = 64 << 20  # one that is larger ends its call, or stream

    @property
    def ping_options(self) -> list[tuple[str, int]]:
        """Return gRPC's options for them. A peer that stands still is noticed as a dead one is."""
        keepalive_ms = int(1e3 * self.keepalive_s)
        return [
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # A keepalive that finds another ping on its way waits as long as that one does.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]


PLAIN = Transport()
