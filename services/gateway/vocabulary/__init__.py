"""The words of all rooms of the gateway: errors, messages, deltas of a chat."""
