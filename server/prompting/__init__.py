"""From items, tools and fields to what the engine is asked.

Owns a prompt's messages, the offer of tools and what constrains them, and the input of custom tools.
"""
