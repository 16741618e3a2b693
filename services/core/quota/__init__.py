"""Quotas: per-minute and concurrency limits of owners, shared among gateways by demand."""
