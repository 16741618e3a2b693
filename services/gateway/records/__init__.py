"""Per-request records for logs, traces, metrics and audits."""
