"""`python -m services.kit.probe HOST:PORT`: exit code 0 if a process says SERVING by grpc.health.v1."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0
USAGE = "usage: python -m services.kit.probe HOST:PORT"


def problem_of(address: str) -> str:
    """Return why the process at `address` is not healthy; empty if it is."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(USAGE)
    if problem := problem_of(sys.argv[1]):
        sys.exit(f"{sys.argv[1]}: {problem}")
