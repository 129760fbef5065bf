"""Benchmarks: `python -m benchmarks --help`. Performance claims of this project come from here alone."""
