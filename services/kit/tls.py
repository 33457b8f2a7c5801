"""Certificates as gRPC's credentials."""

import ssl
from pathlib import Path

import grpc
import structlog

from services.kit.transport import Certificates

log = structlog.get_logger()


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return what a server shows; with a CA, a client without a certificate of it is refused.

    The files are read again for each connection, so that new ones need no restart.
    """
    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(certificates),
        lambda: _newest(certificates),  # type: ignore[arg-type, return-value] # None: as before
        require_client_authentication=bool(certificates.ca_file),
    )


def renew_with_files(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Have connections that begin with `context` show, and ask for, what the files hold then."""
    made = moments(certificates), context

    def give(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        nonlocal made
        try:
            newest = moments(certificates)
            if newest != made[0]:
                made = newest, _server_context(certificates)
        except (OSError, ssl.SSLError) as error:  # as before: they may be half written
            log.warning("certificates_not_read", error=type(error).__name__)
        connection.context = made[1]

    context.sni_callback = give  # called for each, whether or not it names a server


def moments(certificates: Certificates) -> list[int]:
    """Return when each file was written."""
    files = (certificates.cert_file, certificates.key_file, certificates.ca_file)
    return [Path(file).stat().st_mtime_ns for file in files if file]


def _server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert_file, certificates.key_file)
    if certificates.ca_file:
        context.load_verify_locations(certificates.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return what a client shows and trusts; without a CA it trusts the public ones."""
    key, chain = _key_and_chain(certificates)
    return grpc.ssl_channel_credentials(
        root_certificates=_authorities(certificates), private_key=key, certificate_chain=chain
    )


def _newest(certificates: Certificates) -> grpc.ServerCertificateConfiguration | None:
    """Return what the files hold now; None, which keeps what was read last, if they are away."""
    try:
        return _server_configuration(certificates)
    except OSError as error:
        log.warning("certificates_not_read", error=type(error).__name__)
        return None


def _server_configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [_key_and_chain(certificates)], root_certificates=_authorities(certificates)
    )


def _key_and_chain(certificates: Certificates) -> tuple[bytes, bytes]:
    return Path(certificates.key_file).read_bytes(), Path(certificates.cert_file).read_bytes()


def _authorities(certificates: Certificates) -> bytes | None:
    return Path(certificates.ca_file).read_bytes() if certificates.ca_file else None
