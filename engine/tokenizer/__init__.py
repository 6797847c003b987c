"""Text to tokens and back.

Owns the tokenizer, the incremental detokenizer, and chat templates with what they are given.
"""
