"""Checks of a model call: shapes immediately, values once the device has computed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.agreement import OTHERS_REFUSED, any_process
from liger_models.layers.sequences.documents import IGNORE_INDEX, Documents
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    BlockIndexerSpec,
    CompressedAttentionSpec,
    GatedPoolsSpec,
    ModelSpec,
    PooledIndexerSpec,
)

_INTEGERS = (torch.int64, torch.int32)  # accepted by an embedding and the kernels


def check_ids(input_ids: object) -> None:
    """Check that ids are a tensor.

    Raises:
        TypeError: text or a list, for example.
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor of token ids [batch, seq], found {type(input_ids).__name__}; encode "
            "text with the model's tokenizer"
        )


def batch_shape(
    input_ids: Tensor | None, embeds: Tensor | None, hidden_size: int, *, ids_needed: bool = False
) -> tuple[tuple[int, int], torch.device]:
    """(batch, seq) and the device of ids [batch, seq] or embeddings [batch, seq, H]; if `ids_needed`, of ids,
    with optional embeddings.

    Raises:
        DataError: both or neither, the wrong shape or dtype, or no token.
        TypeError: ids that are not a tensor.
    """
    if input_ids is not None:
        check_ids(input_ids)
    if ids_needed and embeds is not None:
        if input_ids is None or input_ids.shape != embeds.shape[:2]:
            raise DataError(
                "the layers of this model have inputs of their own, looked up by id: pass input_ids "
                "[batch, seq] as well as inputs_embeds"
            )
        batch_shape(None, embeds, hidden_size)
    elif (input_ids is None) == (embeds is None):
        raise DataError("pass either input_ids or inputs_embeds")
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


def refuse_float16_training(model: nn.Module, hidden: Tensor) -> None:
    """Refuse to train with a residual stream in float16.

    Raises:
        TypeError: `hidden`, the embeddings, are in float16 and parameters require gradients.
    """
    training = hidden.dtype == torch.float16 and model.training and torch.is_grad_enabled()
    if training and any(p.requires_grad for p in model.parameters()):
        raise TypeError(
            "this model is trained with weights in float16, whose largest number is 65504: in some families "
            "(Gemma 3 among them) hidden states exceed it, and the loss becomes NaN, with adapters on frozen "
            "weights too. Load the weights in bfloat16 or float32, as in from_pretrained(..., "
            "dtype=torch.bfloat16); to evaluate them in float16, call model.eval() or use torch.no_grad()"
        )


def targets_of(documents: Documents, labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    """The target of each token, [T], or None.

    Raises:
        DataError: both kinds of labels, or the wrong shape or dtype.
    """
    if labels is not None and shift_labels is not None:
        raise DataError("pass either labels or shift_labels")
    given = labels if labels is not None else shift_labels
    if given is None:
        return None
    if tuple(given.shape) != documents.shape or given.dtype not in _INTEGERS:
        raise DataError(
            f"labels must be integers, int64 or int32, of the shape of the tokens, {documents.shape}; "
            f"found {given.dtype} of shape {tuple(given.shape)}"
        )
    packed = documents.pack(given)
    return documents.next_labels(packed) if labels is not None else packed


def labels_of_beginnings(
    documents: Documents, labels: Tensor | None, num_items: Tensor | int | None
) -> Tensor | None:
    """Number of documents in packed rows that begin with a labelled token, which nothing predicts; None if
    rows are not packed, or if no tensor may count these labels. A row's own first token is excluded, as in
    transformers' Trainer.
    """
    if not isinstance(num_items, Tensor) or labels is None:
        return None
    if documents.cu_seqlens is None or documents.kept is not None:
        return None
    bounds = documents.cu_seqlens.long().to(labels.device)
    starts, filled = bounds[1:-1], bounds[2:] > bounds[1:-1]
    labelled = labels.flatten()[starts.clamp(max=labels.numel() - 1)] != IGNORE_INDEX
    return (labelled & filled & (starts % documents.shape[1] != 0)).sum()


def refuse_unknown(keywords: Mapping[str, Any], function: str = "forward") -> None:
    """Accept unknown keywords whose value requests nothing, as other libraries often pass them.

    Raises:
        TypeError: a keyword that requests something; the message names it.
    """
    for name, value in keywords.items():
        nothing = {"return_dict": (False, True), "is_causal": (True,)}.get(name, (False,))
        if value is not None and not any(value is one for one in nothing):
            raise TypeError(
                f"{function}() got {name}=..., which this model does not know and would ignore; "
                f"help(model.{function}) lists its keywords"
            )


def check_windows(spec: ModelSpec, extent: int) -> None:
    """Check rows with padding between their tokens; the longest has this extent.

    Raises:
        DataError: layers are recurrent, where padding would change a state; or some layer's window, chunk or
            chosen blocks are shorter than the extent, or tokens are weighed by their distance: here these
            count tokens only, but in other libraries also padding.
    """
    if spec.is_recurrent:
        raise DataError(
            f"attention_mask has zeros between the tokens of a row, over {extent} places, and layers of this "
            "model carry a state from token to token, which padding would change: move all padding to the "
            "ends of the rows"
        )
    mixers = [mixer for block in spec.blocks for mixer in block.mixers]
    if spec.padding_has_positions and any(getattr(mixer, "slopes", None) for mixer in mixers):
        raise DataError(
            f"attention_mask has zeros between the tokens of a row, over {extent} places, and this "
            "model weighs tokens by their distance (ALiBi), which here counts only the tokens: move all "
            "padding to the ends of the rows"
        )
    if any(isinstance(mixer, CompressedAttentionSpec) and mixer.compressor for mixer in mixers):
        raise DataError(
            f"attention_mask has zeros between the tokens of a row, over {extent} places, and layers of this "
            "model compress keys of consecutive tokens, which here are the tokens without padding: move all "
            "padding to the ends of the rows"
        )
    sizes = [getattr(mixer, name, None) for mixer in mixers for name in ("window", "chunk")]
    indexers = [getattr(mixer, "indexer", None) for mixer in mixers]
    of_blocks = BlockIndexerSpec | GatedPoolsSpec | PooledIndexerSpec
    sizes += [one.top_k * one.size for one in indexers if isinstance(one, of_blocks)]
    shortest = min((size for size in sizes if size is not None), default=extent)
    if shortest < extent:
        raise DataError(
            f"attention_mask has zeros between the tokens of a row, over {extent} places, and this model has "
            f"windows, chunks or chosen blocks of {shortest}, which would count only the tokens: move all "
            "padding to the ends of the rows"
        )


class CallChecks:
    """The range of ids and labels and the given count, computed on the device when a call begins (`begin`)
    and read once its layers are queued (`finish`), so that neither host nor device waits.

    Args:
        input_ids: [batch, seq], or None.
        targets: [T], or None.
        vocab_size: ids and labels must be below it.
        num_items: the divisor of the loss, if given.
        sequences: defines this rank's targets, if they are divided over ranks.
        num_ids: upper bound of ids, if not `vocab_size`.
        beginnings: `labels_of_beginnings` of the call.
        groups: process groups in which every process creates this object: `groups_of_step`.
        device: used for their exchange. Default: the device of the targets, or of the ids.
        of_classes: the targets are classes of sequences, and no tokens.

    Attributes:
        num_valid, own_valid: the number of counted labels, in total and on this rank, once `finish` has
            returned.

    Raises:
        DataError: a count that is not positive, or has an unsuitable dtype.
    """

    def __init__(
        self,
        input_ids: Tensor | None,
        targets: Tensor | None,
        vocab_size: int,
        num_items: Tensor | int | None = None,
        sequences: Sequences | None = None,
        num_ids: int | None = None,
        beginnings: Tensor | None = None,
        groups: Sequence[Any] = (),
        device: torch.device | None = None,
        of_classes: bool = False,
    ):
        self._of_classes = of_classes
        self._num_ids = vocab_size if num_ids is None else num_ids
        self._vocab_size, self._with_labels = vocab_size, targets is not None
        self._num_items = num_items
        if isinstance(num_items, Tensor):
            if num_items.dtype in (torch.bfloat16, torch.float16, torch.bool):
                raise DataError(
                    f"num_items_in_batch came as {num_items.dtype}, which does not hold a count; pass a "
                    "number or a tensor of integers (mixed precision casts floating point tensors)"
                )
        elif num_items is not None and not num_items > 0:
            raise DataError(_WRONG_COUNT.format(num_items))
        ids = (
            torch.zeros(2, dtype=torch.long) if input_ids is None else torch.stack(input_ids.aminmax()).long()
        )
        if device is None or not groups:
            device = ids.device if targets is None else targets.device
        if targets is None:
            counts = torch.zeros(4, dtype=torch.long, device=device)
        else:
            valid = targets != IGNORE_INDEX
            seen = torch.where(valid, targets, 0)
            mine = valid if sequences is None else sequences.own(valid)
            counts = torch.stack([valid.sum(), mine.sum(), *seen.aminmax()]).long().to(device)
        rows = [ids.to(device), counts]
        if isinstance(num_items, Tensor):
            rows.append((num_items > 0).all().long()[None].to(device))
            if beginnings is not None:
                rows.append(beginnings.long()[None].to(device))
        self.groups, self._found = groups, torch.cat(rows)
        self._explain: Callable[[], object] = lambda: None

    def begin(
        self,
        wrong: Tensor | None = None,
        explain: Callable[[], object] = lambda: None,
        wait: bool = False,
    ) -> None:
        """Start the copy to the host; with `groups`, exchange whether the batch is refused. Call it before
        the layers run: on a CPU, where collectives block, any process's refusal is raised here.

        Args:
            wrong: whether another check of this call fails, a bool on the device.
            explain: raises that check's error.
            wait: raise a refusal here on a GPU too, since a blocking collective follows.

        Raises:
            DataError: this process or another refuses its batch.
        """
        found, self._explain = self._found, explain
        if self.groups:
            refused = self._is_refused(found)
            if wrong is not None:
                refused = torch.maximum(refused, wrong.long().to(found.device))
            found = torch.cat([any_process(refused, self.groups), found])
        self._counts = HostCopy(found)
        if self.groups and (wait or self._counts.is_there):
            self.finish()

    def _is_refused(self, found: Tensor) -> Tensor:
        """[1] int64: whether `finish` will raise, on the device."""
        lowest_id, highest_id, num_valid, _, lowest_label, highest_label, *given = found
        wrong = (lowest_id < 0) | (highest_id >= self._num_ids)
        wrong |= (lowest_label < 0) | (highest_label >= self._vocab_size)
        if self._with_labels and self._num_items is None:
            wrong |= num_valid == 0
        for number, right in zip(given, (1, 0), strict=False):
            wrong |= number != right
        return wrong.long()[None]

    def finish(self) -> int:
        """Return the number of counted labels.

        Raises:
            DataError: an id or a label outside the vocabulary, no label, or a count that is not above 0; what
                `explain` raises; or another process refuses its batch.
        """
        found = self._counts.tolist()
        refused = self.groups and found.pop(0)
        lowest_id, highest_id, num_valid, own_valid, lowest_label, highest_label, *given = found
        self.num_valid, self.own_valid = num_valid, own_valid
        for what, low, high, vocab in (
            ("id", lowest_id, highest_id, self._num_ids),
            ("label", lowest_label, highest_label, self._vocab_size),
        ):
            if low < 0 or high >= vocab:
                if what == "label" and self._of_classes:
                    raise DataError(
                        f"found the label {low if low < 0 else high}; this model has {vocab} labels: "
                        f"expected 0 to {vocab - 1} or -100"
                    )
                raise DataError(
                    f"found the {what} {low if low < 0 else high}, which is outside the vocabulary of "
                    f"{vocab}: expected 0 to {vocab - 1}{' or -100' if what == 'label' else ''}. Does the "
                    "tokenizer belong to this model?"
                )
        if given[:1] == [0]:
            assert isinstance(self._num_items, Tensor)
            raise DataError(_WRONG_COUNT.format(self._num_items.tolist()))
        if any(given[1:]):
            raise DataError(
                f"the first tokens of {given[1]} packed documents have labels, which nothing predicts, and "
                "num_items_in_batch came as a tensor, as transformers' Trainer counts it, with these: the "
                "loss would be too small. Set these labels to -100, as DataCollatorWithFlattening does, "
                "or pass the count as a number if it is without them"
            )
        if self._with_labels and num_valid == 0 and self._num_items is None:
            raise DataError(
                "no token of the batch has a label (all are -100, padding, or the first of a document), so "
                "the mean loss is undefined; drop the batch, or pass num_items_in_batch"
            )
        self._explain()
        if refused:
            raise DataError(OTHERS_REFUSED)
        return num_valid


_WRONG_COUNT = "num_items_in_batch must be above 0, found {}"
