"""Bytes between KV pool and host memory on one rank."""
