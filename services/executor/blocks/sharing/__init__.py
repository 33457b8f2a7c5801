"""What requests that begin alike have once: trunks, splits, and what is published."""
