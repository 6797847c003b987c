"""What a run is to do: its plan, the history that it continues, and the next step of it."""
