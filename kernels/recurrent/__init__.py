"""Operations of recurrent mixers: the short convolution, the scans and the delta rules.

May import the folder above, `norms`, and the bounds of documents in `attention`.
"""
