"""Shared parts of the losses over a vocabulary: valid labels, the divisor of a mean, and input checks."""

from __future__ import annotations

import torch
from torch import Tensor


def label_weights(
    labels: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Class weight of each label, zero where ignored.  labels [N] -> [N]"""
    valid = labels != ignore_index
    if weight is None:
        return valid.to(dtype)
    return weight.detach().to(dtype)[labels.where(valid, 0)] * valid


def loss_denominator(
    labels: Tensor,
    ignore_index: int,
    weight: Tensor | None,
    token_weights: Tensor | None,
    num_items: int | Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Divisor of reduction="mean", a 0-d tensor on the labels' device.  labels and token_weights [N], the
    latter of `dtype`"""
    if num_items is not None:
        if isinstance(num_items, Tensor):
            return num_items.detach().to(labels.device, dtype).reshape(())
        return torch.full((), num_items, dtype=dtype, device=labels.device)
    if token_weights is None and weight is None:
        return (labels != ignore_index).sum(dtype=dtype)
    w = label_weights(labels, ignore_index, weight, dtype)
    return (w if token_weights is None else w * token_weights).sum()


def reduce_losses(
    losses: Tensor, reduction: str, token_weights: Tensor | None, divisor: Tensor | None
) -> Tensor:
    """Reduce losses [T] times token_weights [T]: unchanged for "none", else summed, for "mean" over
    `divisor`."""
    if token_weights is not None:
        losses = losses * token_weights
    if reduction == "none":
        return losses
    return losses.sum() if divisor is None else losses.sum() / divisor


def mean_divisor(
    labels: Tensor | None, tokens: int, ignore_index: int, num_items: int | Tensor | None, like: Tensor
) -> Tensor:
    """`loss_denominator` with optional labels: None counts all tokens. Has like's device and dtype."""
    if labels is None and num_items is None:
        return like.new_full((), tokens)
    counted = like.new_empty(0) if labels is None else labels
    return loss_denominator(counted, ignore_index, None, None, num_items, like.dtype)


def check_reduction(reduction: str, num_items: int | Tensor | None) -> None:
    """Raise ValueError for an unknown reduction, or for a divisor that it does not use."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides only reduction='mean'; drop it for reduction={reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items has shape {list(num_items.shape)}; expected one number")


def check_label_dtype(labels: Tensor) -> None:
    """Raise TypeError for labels that are not int32 or int64."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}; expected int64 or int32")


def check_weights(
    labels: Tensor, vocab_size: int, class_weight: Tensor | None, token_weights: Tensor | None
) -> None:
    """Raise TypeError or ValueError for incompatible labels, class weights or token weights."""
    check_label_dtype(labels)
    if class_weight is not None and class_weight.shape != (vocab_size,):
        raise ValueError(f"class weights have shape {list(class_weight.shape)}; expected [{vocab_size}]")
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights have shape {list(token_weights.shape)}; expected {list(labels.shape)}, as labels"
        )


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise IndexError for a label outside the vocabulary, if labels can be read without synchronising.

    On a GPU the kernel asserts this, and in compiled code the plain twin's gather does.
    """
    if labels.is_cuda or torch.compiler.is_compiling():
        return
    outside = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if outside.any():
        raise_label_error(labels, outside, vocab_size, ignore_index)


def raise_label_error(labels: Tensor, outside: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise IndexError for the first label marked in `outside`, of the labels' shape."""
    place = outside.nonzero()[0].tolist()
    label, position = int(labels[tuple(place)]), place[0] if len(place) == 1 else place
    raise IndexError(
        f"label {label} at position {position} is outside the vocabulary of {vocab_size}; "
        f"expected 0 to {vocab_size - 1}, or {ignore_index} for a token without a label"
    )
