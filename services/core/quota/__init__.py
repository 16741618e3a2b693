"""Quotas of a gateway: limits of API-key owners, which all gateways share by demand."""
