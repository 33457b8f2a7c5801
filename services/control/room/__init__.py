"""Which requests have blocks: the guard, and the ways back."""
