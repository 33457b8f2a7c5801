"""In the EngineCore process: vLLM's scheduler with our parts, as the step loop's engine."""
