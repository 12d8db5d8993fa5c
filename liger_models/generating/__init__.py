"""Text generation: sampling, stopping, the cache, and recorded decoding steps.

May import layers; the models call it.
"""
