"""In the EngineCore process: vLLM's scheduler with our parts, and what it tells the controller."""
