"""Anything that may come from the open internet, against a gateway of its own."""
