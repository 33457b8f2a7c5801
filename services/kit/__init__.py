"""What makes a process a service: errors, gRPC edge, logs, settings, metrics, clock, life cycle."""
