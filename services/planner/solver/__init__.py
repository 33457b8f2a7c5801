"""The placement program: its data, its bounds, its search."""
