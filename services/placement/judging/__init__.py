"""What a snapshot or a plan is worth: consistent, legal, fast, in time."""
