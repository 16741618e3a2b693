"""The HTTP APIs of OpenAI, Anthropic (Messages) and vLLM, over FastAPI and uvicorn."""
