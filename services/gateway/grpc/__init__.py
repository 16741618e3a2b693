"""The public gRPC port: the typed API of gateway.proto, and KServe's protocol."""
