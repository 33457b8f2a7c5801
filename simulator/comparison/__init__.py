"""Policies beside each other: cells of a grid, run in parallel and kept."""
