"""Who may use the gateway, and how much."""
