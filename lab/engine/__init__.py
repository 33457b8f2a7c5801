"""Engines in this process: run step by step, compared, and given other links."""
