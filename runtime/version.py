"""The version of the distribution; ranks of different versions refuse to work together."""

__version__ = "0.2.0"
