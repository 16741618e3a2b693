"""The load generator of the demo, the simulator and the benchmarks."""
