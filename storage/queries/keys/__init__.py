"""API keys, and the keys that seal reasoning."""
