"""Who runs: pauses, and the way back."""
