"""What plugs into vLLM: the scheduler, and the layer-wise KV manager beside it."""
