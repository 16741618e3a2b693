"""Which clients may use the gateway, and how much."""
