"""Operations of recurrent mixers: the short convolution in front of a state, and the states themselves."""
