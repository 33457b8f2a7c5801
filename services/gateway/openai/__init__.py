"""OpenAI's JSON, and nothing else."""
