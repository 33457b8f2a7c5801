"""One engine over several nodes: a leader that serves, and followers that compute."""
