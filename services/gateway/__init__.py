"""The front door: OpenAI-compatible HTTP in, token streams from the workers out."""
