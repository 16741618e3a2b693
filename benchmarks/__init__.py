"""Benchmarks of tideserve and its peers: traces, workloads, a client process, systems, reports."""
