"""OpenAI-compatible HTTP over FastAPI and uvicorn."""
