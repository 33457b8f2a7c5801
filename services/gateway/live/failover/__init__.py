"""What becomes of requests whose executors are lost, or are leaving."""
