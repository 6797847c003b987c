"""Who is in a step.

Owns the engine thread, the scheduler, the paged KV cache as accounting, the running sequences as arrays, and
speculative decoding.
"""
