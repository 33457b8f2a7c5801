"""vLLM's AsyncLLM behind few verbs."""
