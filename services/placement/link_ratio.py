"""lambda: how much of the pool the link moves while the engine computes a step."""


def link_ratio(*, link_bytes_per_s: float, step_s: float, pool_bytes: float) -> float:
    """Return the bytes that the link moves in a step / the bytes of the KV pool."""
    return link_bytes_per_s * step_s / pool_bytes
