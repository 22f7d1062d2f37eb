"""Scores of rows: the NLL of completions, embeddings of texts, and a diverse choice of embedded rows.

    token sequences with loss masks ─► nll     one row of numbers per sequence ─┐
    texts ─► embed ─► vectors ─► choose: a diverse subset of the rows           ├─► joined to rows by id, used by pools
                                                                                ┘

Scores are tables beside the data, never copies of it. Models run on torch, an optional extra: only `models`
imports it, and `engines` imports that when a model is loaded. `server` needs httpx only.
"""

# Default number of padded tokens per batch; here, so that commands read it without importing NumPy.
TOKEN_BUDGET = 16_384
