"""Tools that tests and benchmarks share: engines, processes, models, workloads."""
