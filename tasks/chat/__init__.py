"""Conversations to token ids with an exact loss mask.

    record → conversation → one rendering → the characters the model would generate → tokens and mask

The mask is built during rendering: the template's own loop and tracked text record each character's message, so
nothing is searched for afterwards.
"""
