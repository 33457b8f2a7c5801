"""What the engine's process knows of each request."""
