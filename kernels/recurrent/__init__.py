"""Operations of recurrent mixers: the short convolution and the delta rules.

May import the folder above, `norms`, and the bounds of documents in `attention`.
"""
