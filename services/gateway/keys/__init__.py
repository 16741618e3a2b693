"""API keys, principals and quotas."""
