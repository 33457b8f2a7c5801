"""Snapshots and plans on the wire, as executor and planner write and read them."""
