"""Limits that kernels and options share. Imports no torch, so that options can be checked at once."""

# Bits of an ancestor mask: nodes of a proposal, or of the frontiers (all levels but the last) of a draft tree.
MAX_NODES = 64
MAX_K = 16  # best tokens of a row that are taken one by one
MOST_SORTED = 64  # more than MAX_K are sorted out
