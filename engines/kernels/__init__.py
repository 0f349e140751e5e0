"""C++ kernels for the layers of a model on a CPU.

torch computes the same wherever they do not serve, but for last bits, and is the truth in tests. That is so of weights
that are numbers, which is checked as a checkpoint is loaded: an FP8 byte that is none would be read as 480.
"""
