"""Groups that never leave by themselves: what they keep, and what goes with a parked request."""
