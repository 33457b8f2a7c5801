"""Figures of the papers, simulated: `make papers-quick`."""
