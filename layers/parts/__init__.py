"""Small modules of a model: norms, MLPs, embeddings, activations and losses.

May import the specs, projections, recomputation and the kernels; modules that combine several parts belong
above.
"""
