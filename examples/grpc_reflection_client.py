"""Stream a chat answer over gRPC from what the server says about itself: no stubs, no .proto.

python examples/grpc_reflection_client.py "What is the with statement?"
"""

import argparse
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "evenflow.gateway.v1.GatewayService"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50050")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()

    with grpc.insecure_channel(args.address) as channel:
        service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(
            SERVICE
        )
        list_models = service.FindMethodByName("ListModels")
        (models,) = call(channel, list_models, {})
        request = {
            "model": args.model or models.models[0].id,
            "messages": [{"role": "user", "content": args.prompt}],
            "sampling": {"max_tokens": args.max_tokens, "temperature": 0},
        }
        for response in call(channel, service.FindMethodByName("Chat"), request):
            print("".join(token.text for token in response.tokens), end="", flush=True)
        print()


def call(channel, method, request):
    """Call a method that takes one message; yield its answers."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    stub = channel.unary_stream if method.server_streaming else channel.unary_unary
    answer = stub(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(ParseDict(request, GetMessageClass(method.input_type)()), timeout=300)
    return answer if method.server_streaming else iter([answer])


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
