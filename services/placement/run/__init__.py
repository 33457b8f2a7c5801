"""Which requests run: pauses, and the way back."""
