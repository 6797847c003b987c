"""Kernels for a GPU, written in Triton.

Owns one module for each group of kernels, and the torch bodies that they are compared with. Importing a
module of kernels needs Triton; `reference` does not.
"""
