"""Slipstream trains draft models for speculative decoding and serves them."""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

__version__ = "0.1.0"
