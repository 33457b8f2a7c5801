"""Policies compared on one engine: an emulated device, a throttled link, the same requests."""
