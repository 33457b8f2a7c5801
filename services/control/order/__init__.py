"""The order of the queue, and how the requests at its head come back."""
