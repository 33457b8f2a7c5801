"""Log probabilities and echoed prompts on the wire, as every service reads and writes them."""

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.logprobs import EchoedPrompt, Logprob, TokenLogprobs


def logprobs_from_proto(message: gen.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_from_proto(message.chosen), tuple(map(_from_proto, message.top)))


def logprobs_to_proto(logprobs: TokenLogprobs) -> gen.TokenLogprobs:
    return gen.TokenLogprobs(chosen=_to_proto(logprobs.chosen), top=map(_to_proto, logprobs.top))


def prompt_from_proto(message: gen.EchoedPrompt) -> EchoedPrompt:
    logprobs = tuple(map(logprobs_from_proto, message.logprobs))
    return EchoedPrompt(message.text, logprobs, tuple(message.token_ids))


def prompt_to_proto(prompt: EchoedPrompt) -> gen.EchoedPrompt:
    return gen.EchoedPrompt(
        text=prompt.text,
        logprobs=map(logprobs_to_proto, prompt.logprobs),
        token_ids=prompt.token_ids,
    )


def _from_proto(message: gen.Logprob) -> Logprob:
    logprob = message.logprob if message.HasField("logprob") else None
    return Logprob(message.id, message.token, logprob)


def _to_proto(logprob: Logprob) -> gen.Logprob:
    return gen.Logprob(id=logprob.id, token=logprob.token, logprob=logprob.logprob)
