"""One step on a device.

Owns the runner, CUDA graphs, the fused forward of a GPU, the native forward of a CPU, and steps whose numbers
do not depend on the batch.
"""
