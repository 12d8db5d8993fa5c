"""Randomised parameters: the zeros and ones of a fresh model would hide faults."""

import torch


def randomise(module, generator=None):
    """Randomise every parameter: matrices preserve the scale of their input, vectors are around one."""
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.3 * noise)
    return module


def randomise_trained(model):
    """Randomise every trained parameter, such as adapters, in name order."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.requires_grad:
                noise = 0.3 * torch.randn(p.shape, generator=generator)
                p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else p * (1 + noise))
    return model
