"""The planner process: which layers of which requests stay on the GPU."""
