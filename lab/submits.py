"""What a submit asks for, as executors without an engine answer it."""

from collections.abc import Iterator

from evenflow.executor.v1 import executor_pb2 as pb


def answers_of(submit: pb.Submit) -> Iterator[pb.Submit]:
    """Yield a submit for each answer, alike but for what answers have of their own."""
    others = list(submit.further_answers)
    submit.ClearField("further_answers")
    yield submit
    for other in others:
        answer = pb.Submit()
        answer.CopyFrom(submit)
        answer.request_id = other.request_id
        answer.trace_context.CopyFrom(other.trace_context)
        answer.sampling.ClearField("seed")
        if other.HasField("seed"):
            answer.sampling.seed = other.seed
        yield answer
