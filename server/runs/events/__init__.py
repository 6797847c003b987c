"""Events of a run: made, written down, shown, and read again."""
