"""The copy engine over streams of a device, its guard, and the devices: CUDA's, and a CPU."""
