"""Doing what a plan says.

Owns the loop over a run's steps, its task, and taking it up again after the process that ran it has ended.
"""
