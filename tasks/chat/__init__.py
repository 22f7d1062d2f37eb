"""Conversations to token ids with a loss mask that can be trusted.

    record ─► conversation ─► one rendering ─► which characters the model would generate ─► tokens and mask

The mask is made by construction: the template itself says, while it renders, which text comes from which message, and
nothing is ever found again by searching for it.
"""
