"""What needs a GPU: `python -m tests.gpu.run`, or `make bench-gpu`."""
