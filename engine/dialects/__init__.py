"""How families of models write reasoning, calls and channels, as data.

Owns the table of dialects, what a row of it is made of, and the formats of calls that rows share.
"""
