"""Documents to token ids, exactly, and token ids to Megatron `.bin/.idx`.

    settings ─► vocabulary ─► gate (fast encoder == reference?) ─► encoder ─► documents ─► bin/idx

Engines (gigatoken, fastokens) encode some hundred times faster than the reference (Hugging Face `tokenizers`, tiktoken,
SentencePiece). Documents with a character that the two treat differently go to the reference, one by one, and the receipt counts
them. For the rest, an engine must match the reference on strings that break tokenizers and on samples of the data. If no engine
does, the reference encodes the whole dataset, and the receipt records this.
"""
