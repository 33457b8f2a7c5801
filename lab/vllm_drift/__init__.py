"""What another vLLM has of the names that the executor uses."""
