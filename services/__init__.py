"""Evenflow's processes and what they share."""
