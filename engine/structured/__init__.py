"""Constrained decoding: which tokens may come next.

Owns grammars and their token masks, and the way from a JSON Schema, a regex or structural tags to a grammar.
"""
