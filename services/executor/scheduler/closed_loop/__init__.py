"""The controller's side of the scheduler: what it sees and orders."""
