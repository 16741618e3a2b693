"""Probes, which measure a single part without a cluster in a separate process."""
