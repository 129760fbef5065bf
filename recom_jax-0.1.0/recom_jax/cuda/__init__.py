"""The CUDA target: generated kernels, their compilation and loading (docs/cuda_target.md)."""
