"""Settings in which a family's peers may be fastest in a training step."""

from __future__ import annotations

import importlib.util
from typing import Any

from liger_models.architectures import Architecture
from liger_models.cards.results import PEERS
from liger_models.layers.specs import (
    AttentionSpec,
    ChannelDeltaSpec,
    GatedConvSpec,
    GatedDeltaSpec,
    ModelSpec,
    SelectiveSpec,
    SSDSpec,
)

# Kernels of recurrent layers, which transformers uses if they are installed.
PACKAGES = {
    GatedDeltaSpec: ("fla", "causal_conv1d"),
    ChannelDeltaSpec: ("fla", "causal_conv1d"),
    SSDSpec: ("mamba_ssm", "causal_conv1d"),
    SelectiveSpec: ("mamba_ssm", "causal_conv1d"),
    GatedConvSpec: ("causal_conv1d",),
}
WIDEST = 4  # convolution of causal_conv1d's kernels


def settings_of_peers(
    spec: ModelSpec, tokens: int, compiled: bool = False, sdpa: bool = True, experts: bool = True
) -> list[str]:
    """Settings that may be a peer's fastest: SDPA has no soft cap and no sinks, and implements windows with a
    mask, which transformers creates only if the tokens exceed the window; experts are grouped products, or
    liger-kernel's own (a loop over them is never the fastest). `compiled` adds the settings that may be
    fastest under torch.compile; `sdpa` and `experts` say whether the reference has SDPA (`has_sdpa`) and a
    choice for its experts (`has_experts_choice`).
    """
    packages = packages_of(spec)
    kinds = [kind + packages for kind in kinds_of_attention(spec, tokens, sdpa)]
    has_experts = experts and any(block.mixture for block in spec.blocks)
    grouped = "+grouped_mm" if has_experts else ""
    settings = [f"{peer}+{kind}{grouped}" for peer in PEERS for kind in kinds]
    if has_experts:
        settings.append(f"{PEERS[0]}+{kinds[0]}")
    if compiled:
        fast = [kind for kind in kinds if kind.partition("+")[0] != "eager"]
        settings += [f"{peer}+{kind}{grouped}+compile" for peer in PEERS for kind in fast]
    return settings


def has_sdpa(family: Architecture) -> bool:
    """Whether the reference supports SDPA; where transformers lacks it, that is not known here."""
    return bool(getattr(_reference(family), "_supports_sdpa", True))


def has_experts_choice(family: Architecture) -> bool:
    """Whether the reference can compute its experts as grouped products; the same where it is lacking."""
    can = getattr(_reference(family), "_can_set_experts_implementation", None)
    return can is None or bool(can())


def _reference(family: Architecture) -> Any:
    try:
        import transformers
    except ImportError:
        return None
    return getattr(transformers, family.reference, None)


def kinds_of_attention(spec: ModelSpec, tokens: int, sdpa: bool = True) -> list[str]:
    """Implementations of attention that may be a peer's fastest."""
    attention = [m for block in spec.blocks for m in block.mixers if isinstance(m, AttentionSpec)]
    if any(part.slopes for part in attention):  # the families' own code, which is eager
        return ["eager"]
    if any(part.softcap or part.sinks for part in attention):
        return ["flex_attention", "eager"]
    plain = "sdpa" if sdpa else "eager"
    if any(part.window is not None and part.window <= tokens for part in attention):
        return [plain, "flex_attention"]
    return [plain]


def packages_of(spec: ModelSpec) -> str:
    """Installed packages whose kernels a peer's recurrent layers can use, as options of a provider."""
    mixers = [mixer for block in spec.blocks for mixer in block.mixers]
    kinds = {type(mixer) for mixer in mixers if getattr(mixer, "conv", 0) <= WIDEST}
    usable = dict.fromkeys(name for kind in PACKAGES if kind in kinds for name in PACKAGES[kind])
    return "".join(f"+{name}" for name in usable if importlib.util.find_spec(name) is not None)
