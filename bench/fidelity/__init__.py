"""Runs of the real engine beside the same runs in the simulator."""
