"""What is kept of each request for log lines, traces, metrics and audits."""
