"""Which callers are let in, and how much each may have."""
