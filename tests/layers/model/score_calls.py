"""Calls of models in test_scoring.py and test_distilling.py: three rows of nine tokens."""

import torch
from torch import nn

CALLS = {
    "rows": {},
    "padded": {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [0] * 2 + [1] * 7])},
    "restarts": {"position_ids": torch.tensor([[*range(4), *range(5)]] * 3)},
}


class Wrapped(nn.Module):
    """Wrapper of a head that adds to its product, as adapters do."""

    def __init__(self, head):
        super().__init__()
        self.head, self.added = head, nn.Parameter(torch.randn(head.in_features, head.out_features) / 9)

    def forward(self, hidden):
        return self.head(hidden) + hidden @ self.added
