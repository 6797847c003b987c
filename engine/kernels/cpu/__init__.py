"""The forward of native decoders on a CPU, compiled for the machine that runs it.

Owns: nothing but the place; `kernels.cpp` is what is computed, `library` builds it and calls it, `panels` and
`forward` are what the engine sees of it. Where it cannot be built, torch's own operations compute.
"""
