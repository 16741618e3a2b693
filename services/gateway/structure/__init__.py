"""What an output must look like: what clients ask, made into grammars, and checked."""
