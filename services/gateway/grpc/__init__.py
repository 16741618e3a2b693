"""The public gRPC door: the typed API of gateway.proto, and KServe's protocol."""
