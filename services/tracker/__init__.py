"""Records requests, their buffers and executor leases in Redis."""
