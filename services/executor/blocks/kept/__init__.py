"""What is kept for a later turn: copied once its request has ended, brought back ahead of it."""
