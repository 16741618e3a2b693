"""What clients may send, whichever door it comes through."""
