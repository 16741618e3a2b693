"""Required forms of outputs: the fields of clients become grammars, which are checked."""
