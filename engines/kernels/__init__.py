"""C++ kernels for decoding on a CPU. torch computes the same wherever they do not serve, and is the truth in tests."""
