"""Which requests may be taken in, beside what a run policy says."""
