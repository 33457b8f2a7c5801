"""`python -m services.kit.probe HOST:PORT`: exit code 0 if a process is SERVING (grpc.health.v1).

`--ca`, and `--cert` with `--key`, are PEM files for a process that speaks TLS; `--name` is what its
certificate is for, if that is not HOST. `--timeout` bounds the wait for an answer.
"""

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def make_channel(arguments: argparse.Namespace) -> grpc.Channel:
    """Open the channel that the command line asks for."""
    if arguments.ca is None:
        return grpc.insecure_channel(arguments.address)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=arguments.ca.read_bytes(),
        private_key=arguments.key and arguments.key.read_bytes(),
        certificate_chain=arguments.cert and arguments.cert.read_bytes(),
    )
    name = [("grpc.ssl_target_name_override", arguments.name)] if arguments.name else []
    return grpc.secure_channel(arguments.address, credentials, options=name)


def problem_of(channel: grpc.Channel, timeout_s: float) -> str:
    """Return why the process at the other end is not healthy; empty if it is."""
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=timeout_s
        )
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.kit.probe")
    parser.add_argument("address", metavar="HOST:PORT")
    for option in ("--ca", "--cert", "--key"):
        parser.add_argument(option, type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", default=TIMEOUT_S)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse(sys.argv[1:])
    with make_channel(arguments) as channel:
        if problem := problem_of(channel, arguments.timeout):
            sys.exit(f"{arguments.address}: {problem}")


if __name__ == "__main__":
    main()
