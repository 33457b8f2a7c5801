"""A node that computes for an engine whose leader serves on another."""
