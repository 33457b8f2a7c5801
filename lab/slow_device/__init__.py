"""An emulated device under an engine on a CPU, which knows nothing of it."""
