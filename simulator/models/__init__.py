"""Models as the simulator computes them: layers by kind, weights and KV, read from config.json."""
