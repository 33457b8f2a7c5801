"""Snapshots, requests to the planner and placement problems, and an oracle for them."""
