"""Copies of tokens and sums of copies: the gradient of each is the other."""

import pytest
import torch

from liger_models.kernels.experts.token_copies import copy_tokens, sum_copies


def positions(tokens, readers, share):
    """Row of each token's copy for each reader, [T, readers] int32, -1 for none; and the number of rows."""
    needed = torch.rand(tokens, readers) < share
    row = (needed.T.flatten().cumsum(0) - 1).view(readers, tokens).T
    return torch.where(needed, row, -1).int().contiguous(), int(needed.sum())


def one_hot(position, num_rows):
    """[R, T] float64: one-hot matrix of the token of each row."""
    matrix = torch.zeros(num_rows, len(position), dtype=torch.float64)
    token, reader = torch.where(position >= 0)
    matrix[position[token, reader].long(), token] = 1
    return matrix


@pytest.mark.parametrize(("tokens", "readers", "share"), [(7, 2, 0.7), (5, 4, 0.0), (6, 3, 1.1), (0, 2, 0.5)])
def test_rows_are_copies_of_their_tokens_and_sums_add_up_rows(
    tokens, readers, share, implementation, assert_near
):
    position, num_rows = positions(tokens, readers, share)
    matrix = one_hot(position, num_rows)
    x, rows = torch.randn(tokens, 33), torch.randn(num_rows, 33)
    wide = torch.randn(tokens, 40)[:, 3:36]  # rows with a gap between them
    assert torch.equal(copy_tokens(wide, position, num_rows).double(), matrix @ wide.double())
    for function, arguments, given, truth in (
        (copy_tokens, (position, num_rows), x, matrix),
        (sum_copies, (position,), rows, matrix.T),
    ):
        given.requires_grad_()
        found = function(given, *arguments)
        upstream = torch.randn_like(found)
        (gradient,) = torch.autograd.grad(found, given, upstream)
        # Sums of up to three numbers, each addition rounded once.
        assert_near(found.detach(), truth @ given.detach().double(), 3)
        assert_near(gradient, truth.T @ upstream.double(), 3)
