"""Stream a chat answer over gRPC with the generated stubs.

python examples/grpc_client.py "What is the with statement?" --rate-tps 12
"""

import argparse
import sys

import grpc

from evenflow.gateway.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50050")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    args = parser.parse_args()

    with grpc.insecure_channel(args.address) as channel:
        gateway = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.ChatRequest(
            model=args.model or first_model(gateway),
            messages=[generation_pb2.ChatMessage(role="user", content=args.prompt)],
            sampling=generation_pb2.SamplingParams(
                max_tokens=args.max_tokens, temperature=args.temperature
            ),
            service_level=generation_pb2.ServiceLevel(
                consumption_rate_tps=args.rate_tps, pace_tail=args.rate_tps is not None
            ),
        )
        for response in gateway.Chat(request, timeout=300):
            print("".join(token.text for token in response.tokens), end="", flush=True)
            if response.HasField("finish"):
                reason = generation_pb2.FinishReason.Name(response.finish.reason)
                tokens = response.finish.usage.num_output_tokens
                print(f"\n[{reason}, {tokens} tokens]", file=sys.stderr)


def first_model(gateway: gateway_pb2_grpc.GatewayServiceStub) -> str:
    models = gateway.ListModels(gateway_pb2.ListModelsRequest(), timeout=10).models
    if not models:
        sys.exit("no model is being served")
    return models[0].id


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
