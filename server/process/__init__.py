"""The process: its start, its phases, its end, and the sweep that runs beside it."""
