"""Fuzzers: seeded, bounded, each with a short form among the ordinary tests."""
