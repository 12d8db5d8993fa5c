"""What a call of the model must satisfy: shapes at once, values when the device has got to them."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.host_copy import HostCopy
from liger_models.layers.sequences import IGNORE_INDEX, Sequences

_INTEGERS = (torch.int64, torch.int32)  # what an embedding and the kernels take


def batch_shape(
    input_ids: Tensor | None, embeds: Tensor | None, hidden_size: int
) -> tuple[tuple[int, int], torch.device]:
    """(batch, seq) and the device of ids [batch, seq] or embeddings [batch, seq, H].

    Raises:
        DataError: both or neither, the wrong shape or dtype, or no token.
    """
    if (input_ids is None) == (embeds is None):
        raise DataError("give either input_ids or inputs_embeds")
    if input_ids is not None:
        if input_ids.dim() != 2 or input_ids.dtype not in _INTEGERS:
            raise DataError(
                f"input_ids must be integers, int64 or int32, of shape [batch, seq], found "
                f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
            )
        given = input_ids
    else:
        assert embeds is not None
        if embeds.dim() != 3 or embeds.shape[-1] != hidden_size:
            raise DataError(
                f"inputs_embeds must have the shape [batch, seq, {hidden_size}], found {tuple(embeds.shape)}"
            )
        given = embeds
    if 0 in given.shape[:2]:
        raise DataError(f"the batch holds no token: its shape is {tuple(given.shape)}")
    return (given.shape[0], given.shape[1]), given.device


def targets_of(sequences: Sequences, labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    """What every token shall predict, [T], or None.

    Raises:
        DataError: both kinds of labels, or the wrong shape or dtype.
    """
    if labels is not None and shift_labels is not None:
        raise DataError("give either labels or shift_labels")
    given = labels if labels is not None else shift_labels
    if given is None:
        return None
    if tuple(given.shape) != sequences.shape or given.dtype not in _INTEGERS:
        raise DataError(
            f"labels must be integers, int64 or int32, of the shape of the tokens, {sequences.shape}; "
            f"found {given.dtype} of shape {tuple(given.shape)}"
        )
    packed = sequences.pack(given)
    return sequences.next_labels(packed) if labels is not None else packed


class CallChecks:
    """The range of ids and labels, counted on the device when the call begins and looked at when its layers
    are queued, so that neither waits.

    Args:
        input_ids: [batch, seq], or None.
        targets: [T], or None.
        vocab_size: ids and labels must be below it.
    """

    def __init__(self, input_ids: Tensor | None, targets: Tensor | None, vocab_size: int):
        self._vocab_size, self._with_labels = vocab_size, targets is not None
        self._counts: HostCopy | None = None
        if torch.compiler.is_compiling():
            return
        ids = (
            torch.zeros(2, dtype=torch.long) if input_ids is None else torch.stack(input_ids.aminmax()).long()
        )
        device = ids.device if targets is None else targets.device
        if targets is None:
            counts = torch.zeros(3, dtype=torch.long, device=device)
        else:
            valid = targets != IGNORE_INDEX
            seen = torch.where(valid, targets, 0)
            counts = torch.stack([valid.sum(), *seen.aminmax()]).long()
        self._counts = HostCopy(torch.cat([ids.to(device), counts]))

    def finish(self, num_items: Tensor | int | None = None) -> int | None:
        """The number of labels that count; None if that is not known on the host.

        Raises:
            DataError: an id or a label outside the vocabulary, no label, or a count that is not above 0.
        """
        if isinstance(num_items, int | float) and not num_items > 0:
            raise DataError(f"num_items_in_batch must be above 0, found {num_items}")
        if self._counts is None:
            return None
        lowest_id, highest_id, num_valid, lowest_label, highest_label = self._counts.tolist()
        vocab = self._vocab_size
        for what, low, high in (("id", lowest_id, highest_id), ("label", lowest_label, highest_label)):
            if low < 0 or high >= vocab:
                raise DataError(
                    f"found the {what} {low if low < 0 else high}, which is outside the vocabulary of "
                    f"{vocab}: expected 0 to {vocab - 1}{' or -100' if what == 'label' else ''}. Does the "
                    "tokenizer belong to this model?"
                )
        if self._with_labels and num_valid == 0 and num_items is None:
            raise DataError(
                "no token of the batch has a label (all are -100, padding, or the first of a document), so "
                "the mean loss is undefined; drop the batch, or pass num_items_in_batch"
            )
        return num_valid
