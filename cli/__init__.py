"""The `evenflow` command: the local stack, and those who use it from a terminal."""
