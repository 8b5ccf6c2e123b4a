"""Slipstream trains draft models for speculative decoding and serves them."""

__version__ = "0.1.0"
