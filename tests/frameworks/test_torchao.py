"""torchao's optimizer with 8-bit moments trains our models unchanged. Skipped if torchao is not installed."""

import pytest
import torch

optim = pytest.importorskip("torchao.optim")


@pytest.mark.slow
def test_bfloat16_weights_learn_with_8_bit_moments(make_model):
    model = make_model(vocab_size=512, hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=True)
    ids = torch.randint(512, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)  # the same batch each time
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.numel() >= 4096]
    assert states
    assert all(hasattr(state, "codes") and state.codes.dtype == torch.uint8 for state in states)
