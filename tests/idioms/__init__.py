"""Every idiom of `examples.idioms`: equal to plain JAX, and fused as far as it can be.

Those written with flax, haiku, equinox or keras are skipped where the package is absent
(`pip install 'recom_jax[idioms]'`).
"""
