"""A model's tokens to reasoning, text and calls.

Owns the incremental parser, stop strings, and one scanner for each format of calls.
"""
