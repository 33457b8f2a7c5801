"""Which request owns which block of the pool and which slot of the host. No tensors."""
