"""Known families that are not supported, and the missing features that each needs."""

MISSING: dict[str, str] = {
    "gemma3n": "several residual streams (AltUp), low-rank branches (LAuReL) and sparse activations",
    "gemma3n_text": "several residual streams (AltUp), low-rank branches (LAuReL) and sparse activations",
    "minimax": "lightning linear attention",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "rwkv": "the recurrence of RWKV",
    "xlstm": "the matrix memories of xLSTM",
    "zamba": "heads of state-space layers (Mamba), and attention whose weights several layers share",
    "zamba2": "blocks of attention and an MLP that several layers share, with adapters for each layer",
}
"""The missing part, by `model_type`. An entry goes when its family is registered."""
