"""How much the gateway takes at a time, and how requests are ended early."""
