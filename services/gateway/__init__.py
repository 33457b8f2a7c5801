"""The edge: OpenAI HTTP and gRPC streaming, tokens paced at the reader's speed."""
