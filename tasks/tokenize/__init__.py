"""Documents to token ids, exactly, and token ids to Megatron `.bin/.idx`.

    settings ─► vocabulary ─► gate (fast encoder == reference?) ─► encoder ─► documents ─► bin/idx

gigatoken encodes some hundred times faster than the reference (Hugging Face `tokenizers`, tiktoken, SentencePiece).
Documents that hold a character of which the two libraries know different things go to the reference, one by one, and the
receipt counts them. With these set apart, gigatoken must first match the reference on strings that break tokenizers and
on documents of the actual data; where it does not, the reference encodes the whole data set, and the receipt says so.
"""
