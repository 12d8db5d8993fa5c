"""Audio inputs: spectrograms cut into frames, their encoder, and its connection to the language model.

May import the parts of vision, which it shares, and everything below them; the model imports it.
"""
