"""Answers `Plan`: a placement for a snapshot."""
