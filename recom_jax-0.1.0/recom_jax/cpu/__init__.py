"""The CPU target: programs encoded for the prebuilt interpreter in the extension."""

from recom_jax.cpu.encode import Encoded, encode

__all__ = ["Encoded", "encode"]
