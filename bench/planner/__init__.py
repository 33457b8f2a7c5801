"""How fast and how good the planner is: `python -m bench.planner`."""
