"""What models make of conversations: how likely they find a completion, and where a text lies among others.

    token sequences with loss masks ─► nll     one row of numbers per sequence ─┐
    candidates' texts ─► embed ─► vectors ─► choose: a diverse part of them     ├─► joined to rows by id, named in pools
                                                                                ┘

Scores are tables beside the data, never copies of it. Models run on torch, which is an extra: `nll`, `embed` and
`choose` are NumPy and Arrow; `causal` and `pooling` need torch, and `engines` imports them when an engine is made.
"""
