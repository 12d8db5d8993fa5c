"""Medusa heads (Cai et al., 2024, arXiv:2401.10774): additional heads that predict the tokens after the next
one, so that generation can verify several at once.

    head k of K:  h -> W_k (h + silu(A_k h + a_k)),  blocks like the inner one as many as there are layers
    loss = sum over k of decay^k * cross entropy(head k, the token k + 1 after the one at hand)

    medusa = MedusaModel(model, num_heads=3)
    medusa(input_ids, labels=labels).loss.backward()      # trains only the heads
    medusa.save_heads("out")

Files have the format of the paper's authors, which inference engines read: medusa_lm_head.safetensors with
`K.LAYER.linear` and `K.LAYERS`, and a config.json with their numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.checkpoints.atomic import atomic_folder
from liger_models.convert.checkpoints.shards import whole
from liger_models.convert.errors import CheckpointError
from liger_models.layers.model.call_checks import CallChecks, batch_shape, targets_of
from liger_models.layers.model.distilling import TeacherCall
from liger_models.layers.model.head import LMHead, LogitForm, loss_of_head
from liger_models.layers.model.output import CausalLMOutput
from liger_models.layers.projections.linear import Linear
from liger_models.layers.sequences.agreement import exchange_device, groups_of_step, refusing_together
from liger_models.layers.sequences.documents import IGNORE_INDEX
from liger_models.layers.sequences.sequences import Sequences

TENSORS, CONFIG = "medusa_lm_head.safetensors", "config.json"


class ResBlock(nn.Module):
    """h + silu(linear(h)); initially the identity except for the bias."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = Linear(hidden_size, hidden_size, bias=True)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaHead(nn.Sequential):
    """Blocks and a projection onto the vocabulary."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """hidden [T, H] -> logits [T, V], or with targets [T] their mean loss, zero without valid targets."""
        *blocks, projection = self
        for block in blocks:
            hidden = block(hidden)
        if targets is None:
            return projection(hidden)
        count = (targets != IGNORE_INDEX).sum().clamp(min=1)
        return loss_of_head(projection, hidden, targets, num_items=count)


class MedusaModel(nn.Module):
    """A model and its Medusa heads.

    Args:
        model: any causal language model of liger_models. num_heads, num_layers: number of heads, and of
        blocks in each. decay: weight of each head's loss relative to the previous one's. trained_base: weight
        of the model's own loss, to train everything (Medusa-2). None: the model runs without
            gradients (Medusa-1).

    The heads' projections are initialised with copies of the model's own: create them before sharding the
    model.
    """

    def __init__(
        self,
        model: nn.Module,
        num_heads: int = 3,
        num_layers: int = 1,
        decay: float = 0.8,
        trained_base: float | None = None,
    ):
        super().__init__()
        if num_heads < 1 or num_layers < 1:
            raise ValueError(
                f"found num_heads={num_heads}, num_layers={num_layers}; expected 1 or more of each"
            )
        self.model = model
        self.decay, self.trained_base = decay, trained_base
        own: Any = model.lm_head
        vocab_size, hidden_size = own.weight.shape
        heads = []
        for _ in range(num_heads):
            with torch.device(own.weight.device):
                blocks = [ResBlock(hidden_size) for _ in range(num_layers)]
                head = MedusaHead(*blocks, LMHead(hidden_size, vocab_size)).to(own.weight.dtype)
            head[-1].weight.data.copy_(own.weight.data)  # type: ignore[operator, union-attr]
            heads.append(head)
        self.medusa_head = nn.ModuleList(heads)
        if trained_base is None:
            model.requires_grad_(False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> CausalLMOutput:
        """Returns `loss`, and `head_losses` [num_heads], each a mean over the labels of its head, without
        gradients.

        Raises:
            DataError: as in the model's own call.
        """
        groups, own_device = groups_of_step(self), exchange_device(self.medusa_head)
        with refusing_together(groups, own_device):
            shape, device = batch_shape(input_ids, None, 0)
            sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens)
            targets = targets_of(sequences.documents, labels, None)
            assert targets is not None
            width: Any = self.medusa_head[0][-1].out_features  # type: ignore[index]
            checks = CallChecks(input_ids, targets, width, groups=groups, device=own_device)
        checks.begin()
        found: list[Tensor] = []

        def use(head: nn.Module, hidden: Tensor, form: LogitForm) -> None:
            if self.trained_base is not None:
                found.append(loss_of_head(head, hidden, targets, form=form))
            with torch.set_grad_enabled(gradients):
                later = targets
                for medusa_head in self.medusa_head:
                    later = sequences.documents.next_labels(later)
                    found.append(medusa_head(hidden, later))

        gradients = torch.is_grad_enabled()
        with torch.set_grad_enabled(gradients and self.trained_base is not None):
            self.model(input_ids=input_ids, teaching=TeacherCall(sequences, use))
        checks.finish()
        losses = found[-len(self.medusa_head) :]
        loss = torch.stack([self.decay**k * loss for k, loss in enumerate(losses, 1)]).sum()
        if self.trained_base is not None:
            loss = loss + self.trained_base * found[0]
        return CausalLMOutput(loss=loss, head_losses=torch.stack(losses).detach())

    def save_heads(self, folder: str | Path, base_model: str = "") -> None:
        """Write the heads in the format of inference engines. If they are sharded over processes (FSDP2), all
        must call this; the first one writes.

        Args:
            folder: output folder; its two files are replaced atomically.
            base_model: name or folder of the heads' model.
        """
        from safetensors.torch import save_file

        tensors = {name: whole(p).cpu().contiguous() for name, p in self.medusa_head.state_dict().items()}
        num_layers = len(self.medusa_head[0]) - 1  # type: ignore[arg-type]
        config = {
            "medusa_num_heads": len(self.medusa_head),
            "medusa_num_layers": num_layers,
            "base_model_name_or_path": base_model,
            "version": "2",
        }
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        with atomic_folder(Path(folder), replaces=lambda name: name in (TENSORS, CONFIG)) as new:
            save_file(tensors, new / TENSORS, {"format": "pt"})
            (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def load_heads(self, folder: str | Path) -> None:
        """Read the files of `save_heads`.

        Raises:
            CheckpointError: the heads differ from these.
        """
        from safetensors.torch import load_file

        tensors, own = load_file(Path(folder) / TENSORS), self.medusa_head.state_dict()
        shapes, expected = ({name: list(t.shape) for name, t in named.items()} for named in (tensors, own))
        if shapes != expected:
            names = shapes.keys() | expected.keys()
            name = min(name for name in names if shapes.get(name) != expected.get(name))
            found, wanted = shapes.get(name, "missing"), expected.get(name, "none")
            raise CheckpointError(
                f"{Path(folder) / TENSORS}: {name} is {found}, but the model's heads have {wanted}; create "
                f"MedusaModel with the num_heads and num_layers of {CONFIG}"
            )
        self.medusa_head.load_state_dict(tensors)
