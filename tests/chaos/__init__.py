"""Faults, done to real servers, and a check of what their clients saw: `python -m tests.chaos.run --help`."""
