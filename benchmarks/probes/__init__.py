"""Probes measure single parts without a cluster, each in a process of its own."""
