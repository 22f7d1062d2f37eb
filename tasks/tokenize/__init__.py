"""Documents to token ids, exactly, and token ids to Megatron `.bin/.idx`.

    settings ─► vocabulary ─► gate (fast encoder == reference?) ─► encoder ─► documents ─► bin/idx

gigatoken encodes some hundred times faster than the Hugging Face `tokenizers` reference, and must first match it on
nasty strings and on documents of the actual data; where it does not, the reference is used and the receipt says so.
"""
