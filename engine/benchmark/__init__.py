"""What speed is measured against.

Owns the roofline of a decode step, checkpoints of real sizes with random weights, and a description of the
machine.
"""
