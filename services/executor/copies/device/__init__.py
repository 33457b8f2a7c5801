"""The copy engine of a GPU."""
