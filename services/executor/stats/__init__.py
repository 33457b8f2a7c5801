"""What the engine reports of its KV and its loop, and how Prometheus sees it."""
