"""Where requests' KV is: counted blocks of the pool, slots of the host."""
