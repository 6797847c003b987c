"""The kernels of a GPU: Triton bodies of what a step of a native decoder is made of.

Owns: nothing but the place; import the modules, and only where there is Triton.
"""
