"""Connections to executors, and which one takes a request."""
