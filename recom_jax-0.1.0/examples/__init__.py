"""Recommendation models in plain JAX, as a user writes them, and readers for their public data.

Run the tour with `python -m examples.demo`.
"""
