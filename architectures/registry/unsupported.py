"""Known families that are not supported, and the missing features that each needs."""

_MAMBA = "state-space layers (Mamba)"
_MAMBA_2 = "state-space layers (Mamba 2)"

MISSING: dict[str, str] = {
    "falcon_mamba": _MAMBA,
    "gemma3n": "several residual streams (AltUp), low-rank branches (LAuReL) and sparse activations",
    "gemma3n_text": "several residual streams (AltUp), low-rank branches (LAuReL) and sparse activations",
    "jamba": f"{_MAMBA} next to attention",
    "mamba": _MAMBA,
    "minimax": "lightning linear attention",
    "recurrent_gemma": "gated linear recurrences (RG-LRU)",
    "rwkv": "the recurrence of RWKV",
    "xlstm": "the matrix memories of xLSTM",
    "zamba": f"{_MAMBA}, and attention whose weights several layers share",
    "zamba2": f"{_MAMBA_2}, and attention whose weights several layers share",
}
"""The missing part, by `model_type`. An entry goes when its family is registered."""
