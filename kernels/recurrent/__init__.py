"""Operations of recurrent mixers: the short convolution in front of a state, and the states themselves.

May import the folder above, `norms`, and the bounds of documents in `attention`.
"""
