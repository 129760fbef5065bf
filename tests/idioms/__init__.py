"""Every idiom of `examples.idioms`: equal to plain JAX, and fused as far as it can be."""
