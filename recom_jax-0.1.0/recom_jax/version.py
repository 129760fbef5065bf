"""The version, here and nowhere else; packaging reads it from this file without importing anything."""

__version__ = "0.1.0"
