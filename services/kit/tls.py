"""Certificates as gRPC's credentials."""

from pathlib import Path

import grpc

from services.kit.transport import Certificates


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return what a server shows; with a CA, a client without a certificate of it is refused."""
    return grpc.ssl_server_credentials(
        [_key_and_chain(certificates)],
        root_certificates=_authorities(certificates),
        require_client_auth=bool(certificates.ca_file),
    )


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return what a client shows and trusts; without a CA it trusts the public ones."""
    key, chain = _key_and_chain(certificates)
    return grpc.ssl_channel_credentials(
        root_certificates=_authorities(certificates), private_key=key, certificate_chain=chain
    )


def _key_and_chain(certificates: Certificates) -> tuple[bytes, bytes]:
    return Path(certificates.key_file).read_bytes(), Path(certificates.cert_file).read_bytes()


def _authorities(certificates: Certificates) -> bytes | None:
    return Path(certificates.ca_file).read_bytes() if certificates.ca_file else None
