"""Prompts for the default model: short and long, prose, code and lists."""

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Explain why the sky is blue, and why the sea is. " * 2,
    "A list of prime numbers: 2, 3, 5, 7,",
    "I write to you about the tide tables. " * 3,
    "Water boils at",
    "The three laws of robotics are:\n1.",
)
