"""Policies to compare with: papers' baselines and ablations, loaded by `module:attribute`."""
