"""What vLLM loads by name in its processes: connector, specs, workers."""
