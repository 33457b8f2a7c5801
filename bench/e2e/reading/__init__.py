"""Readers at reading speed on the engine, beside vLLM at its watermarks."""
