"""The measured systems, and the parser of their names."""
