"""What an owner may use in a minute and at once, shared among gateways by demand."""
