"""Options on their way into another process."""

import json
from types import SimpleNamespace
from typing import Any, cast

from services.control.options import ControllerOptions
from services.kit.transport import Certificates, Transport
from services.placement.types import PolicyParameters, VictimRule


def test_options_arrive_as_they_were_given() -> None:
    options = ControllerOptions(
        policy="tokenflow",
        shadow_policy="vllm",
        planner_address="127.0.0.1:1",
        transport=Transport(
            certificates=Certificates(cert_file="a.pem", key_file="b.pem", ca_file="c.pem"),
            keepalive_s=2.5,
        ),
        parameters=PolicyParameters(alpha=2.0, deposit=False, victim_rule=VictimRule.LONGEST),
    )

    sent = json.loads(json.dumps(options.engine_args()))

    config = cast(Any, SimpleNamespace(additional_config=sent))
    assert ControllerOptions.of(config) == options


def test_an_engine_that_was_told_nothing_has_the_defaults() -> None:
    config = cast(Any, SimpleNamespace(additional_config=None))

    assert ControllerOptions.of(config) == ControllerOptions()
