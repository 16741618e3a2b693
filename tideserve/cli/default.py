"""Defaults that several commands share."""

DEFAULT_PORT = 8000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_WORKERS = 2
