"""What readers feel of executors that die, hang, leave, or are cut off."""
