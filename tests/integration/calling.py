"""An answer that thinks, speaks and calls a function, as the executor tells it."""

from pydantic import BaseModel

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import generation_pb2 as gen


def part(index: int, id: str = "", name: str = "", arguments: str = "") -> executor_pb2.Token:
    call = gen.ToolCallPart(index=index, id=id, name=name, arguments=arguments)
    return executor_pb2.Token(tool_calls=[call])


SAID: list[str | executor_pb2.Token] = [
    executor_pb2.Token(reasoning="They ask "),
    executor_pb2.Token(reasoning="for rain."),
    "",
    "One moment.",
    part(0, "c0", "weather"),
    part(0, arguments='{"city": '),
    part(0, arguments='"Oslo"}'),
]


class Weather(BaseModel):
    city: str
    is_wet: bool
