"""A served model as its readers and watchers see it."""
