"""Files and batches: requests in a file, each answered exactly once."""
