"""Experts of text, and as many others of pictures, with a router of their own (ERNIE 4.5 Technical Report,
Baidu, 2025, section 2.1: a heterogeneous mixture with experts isolated by modality).

    y = experts(x) of text tokens, or of_images(x) of picture tokens, + shared(x) of all
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.experts.sinks import SinkExperts
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipes
from liger_models.layers.sequences.agreement import is_of_several
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import MoESpec


class ModalExperts(MixtureOfExperts):
    """A mixture whose own router and experts are those of text.

    In checkpoints the experts of pictures are numbered after those of text.

    Args:
        hidden_size: the width H of input and output.
        spec: the experts of text, the width of those of pictures, the routing of both, the shared expert.

    Attributes:
        of_images: router and experts of pictures.
    """

    has_image_experts = True

    def __init__(self, hidden_size: int, spec: MoESpec):
        super().__init__(hidden_size, spec)
        assert spec.image_size is not None
        own = replace(spec, intermediate_size=spec.image_size, image_size=None, input_noise=0.0)
        own = replace(own, shared_expert=None, shared_gate=False, shared_scale=1.0, output_norm=None)
        self.of_images = MixtureOfExperts(hidden_size, own)
        self.of_images.experts.first_number = spec.num_experts

    def forward(
        self,
        x: Tensor,
        sequences: Sequences | None = None,
        routed_by: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> [T, H]. `sequences.modality` tells which tokens are pictures'; without it all are text.

        Raises:
            ValueError: another router's input, token ids, or experts that ranks share.
        """
        if routed_by is not None or ids is not None:
            raise ValueError("experts of text and of pictures route by their own input, found another or ids")
        modality = None if sequences is None else sequences.modality
        if modality is None or sequences is None:
            y = super().forward(x, sequences)
            if not is_of_several(self.of_images):
                return y
            # Other processes may have pictures, and would wait for the gradients of this one.
            nothing, _ = self.of_images.routed(x[:0], sequences, x[:0])
            return y + nothing.sum().to(y.dtype)
        if self.input_noise is not None:
            x = self.input_noise(x)
        text, pictures = carry_recipes(modality.apart(x), modality.apart, x, deep=True)
        of_text, logits = self.routed(text, sequences, text)
        of_pictures, others = self.of_images.routed(pictures, sequences, pictures)
        self._note(modality.joined(logits, others), sequences)
        return self._with_shared(x, modality.joined(of_text, of_pictures))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Saved bytes per token, as if all had the modality that keeps more; and at the level `all` the
        tokens in the order of their modalities.
        """
        text, pictures = (
            mixture.router.activation_bytes(level, itemsize)
            + mixture.experts.activation_bytes(level, itemsize)
            for mixture in (self, self.of_images)
        )
        ordered = itemsize * self.hidden_size if level == "all" else 0
        return super().activation_bytes(level, itemsize) + max(0, pictures - text) + ordered


def make_experts(hidden_size: int, spec: MoESpec) -> MixtureOfExperts:
    """The experts of a spec."""
    if spec.sink_experts:
        return SinkExperts(hidden_size, spec)
    return (MixtureOfExperts if spec.image_size is None else ModalExperts)(hidden_size, spec)
