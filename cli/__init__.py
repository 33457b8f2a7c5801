"""The `evenflow` command: the local stack, and its clients in a terminal."""
