"""The gateway: serves clients over HTTP and gRPC, and streams tokens from the workers."""
