"""What a step takes: who is in it, what it computes, reads and fetches."""
