"""The host's side: pinned memory near its device."""
