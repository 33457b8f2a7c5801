"""Who has blocks: the guard, and the ways back."""
