"""Benches: what BENCHMARKS.md is made of. `make bench` runs them all; each prints its figures."""
