"""vLLM's own blocks, each request's KV whole: its schedulers with readers, and a run policy."""
