"""Layer-wise KV on a GPU: exactness, the link, overlap, and what it costs when nothing moves."""
