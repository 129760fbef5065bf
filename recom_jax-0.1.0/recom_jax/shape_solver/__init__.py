"""Symbolic sizes, the equalities between them, and facts about values. Imports no JAX."""
