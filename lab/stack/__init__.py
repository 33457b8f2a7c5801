"""Real processes on free ports: executors, planners, Redis, all of it together."""
