"""What to ask of the solver, and what to make of its answers: OrbitFlow and its variants."""
