"""Notices of the ends of runs: when each is tried, and one signed POST."""
