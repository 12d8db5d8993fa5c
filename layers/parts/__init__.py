"""Small modules of a model: norms, MLPs, embeddings, activations and losses.

May import the specs, projections, recomputation and the kernels. Anything built of several of them belongs
to `attention`, `experts` or `blocks`.
"""
