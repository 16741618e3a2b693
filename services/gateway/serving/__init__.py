"""The request path shared by all APIs: prepare, generate, write."""
