"""A sender's side of the tracker: what changed since the last report, and the calls."""
