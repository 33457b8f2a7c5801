"""Run policies as papers have them."""
