"""Why a token is late means the same to executor and gateway."""

import pytest

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import generation_pb2 as gen
from services.executor import convert as executor
from services.executor.types import Token
from services.gateway import convert as gateway
from services.generation.convert import CAUSE_TO_PROTO, delay_from_proto
from services.pacing.cause import Cause, Delay


@pytest.mark.parametrize("cause", CAUSE_TO_PROTO)
def test_a_delay_survives_the_step_stream(cause: Cause) -> None:
    delay = Delay(cause, 0.25)

    message = executor._token(Token(9, "x", delay=delay)).SerializeToString()

    token = gateway.token_from_proto(executor_pb2.Token.FromString(message), 3)
    assert (token.index, token.id, token.text, token.delay) == (3, 9, "x", delay)


def test_a_token_in_time_has_none() -> None:
    message = executor._token(Token(9, "x"))

    assert gateway.token_from_proto(message, 0).delay is None


def test_the_engine_has_all_causes_but_the_network_and_its_own_loss() -> None:
    assert CAUSE_TO_PROTO.keys() == set(Cause) - {Cause.NETWORK, Cause.FAILOVER}
    assert set(CAUSE_TO_PROTO.values()) == set(gen.DelayCause.values()) - {0}


def test_a_cause_of_a_newer_executor_is_somebodys_plan() -> None:
    assert delay_from_proto(gen.Delay(late_s=1.0)) == Delay(Cause.PLANNER, 1.0)
