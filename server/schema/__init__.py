"""What clients may send and what they are sent: request fields, items, tools, events, each as a table.

Owns the wire's shapes. Refuses to know storage, the engine's work and HTTP.
"""
