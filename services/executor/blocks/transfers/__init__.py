"""What goes between pool and host, step by step."""
