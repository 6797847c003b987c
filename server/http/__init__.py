"""What every request and reply goes through.

Owns authentication, idempotency, bodies and queries, the boundary where exceptions become replies, and
streams.
"""
