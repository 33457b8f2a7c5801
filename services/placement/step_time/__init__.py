"""What a step takes: which requests are in it, what it computes, reads and fetches."""
