"""The operations of kernel_operations.py in eager PyTorch, as a model without kernels computes them."""

import torch
import torch.nn.functional as F


def eager_rms_norm(x, weight, eps, offset, cast):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        return (weight + offset) * normed.to(x.dtype)
    return (normed * (weight.to(normed.dtype) + offset)).to(x.dtype)


def eager_gated_norm(x, gate, weight, activation, gate_first, cast="llama"):
    groups = 2 if gate_first else x.shape[-1] // len(weight)
    activated = activation(gate.to(torch.promote_types(gate.dtype, torch.float32)))
    wide = x.to(activated.dtype) * (activated if gate_first else 1)
    wide = wide.unflatten(-1, (groups, -1))
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).flatten(-2)
    scale = weight if gate_first else weight.repeat(groups)
    if cast == "llama":
        y = scale * normed.to(x.dtype)
    else:
        y = scale.to(normed.dtype) * normed
    return y if gate_first else (y * activated).to(x.dtype)


def eager_short_conv(x, weight, bias):
    """Convolve documents of four tokens separately; the last may be shorter."""
    taps = weight.shape[1]
    padded = F.pad(x, (0, 0, 0, -len(x) % 4)).unflatten(0, (-1, 4)).transpose(1, 2)  # [documents, C, 4]
    z = F.conv1d(F.pad(padded, (taps - 1, 0)), weight.to(x.dtype)[:, None], None, groups=len(weight))
    z = z.transpose(1, 2).flatten(0, 1)[: len(x)]
    return z if bias is None else z + bias


def eager_selective_scan(x, dt, A_log, B, C, D, dt_bias):
    """Scan documents of four tokens side by side; the last may be shorter."""
    x_of, dt_of, b_of, c_of = (
        F.pad(wide(v), (0, 0, 0, -len(x) % 4)).unflatten(0, (-1, 4)) for v in (x, dt, B, C)
    )
    state, outputs = 0, []
    for t in range(4):
        step = F.softplus(dt_of[:, t] + wide(dt_bias))[..., None]  # [documents, channels, 1]
        state = torch.exp(-wide(A_log).exp() * step) * state + step * x_of[:, t, :, None] * b_of[:, t, None]
        outputs.append((state * c_of[:, t, None]).sum(-1) + wide(D) * x_of[:, t])
    return torch.stack(outputs, 1).flatten(0, 1)[: len(x)].to(x.dtype)


def eager_rg_lru(x, gates, bias, decay):
    """Scan documents of four tokens side by side; the last may be shorter."""
    padded = (F.pad(wide(v).flatten(1), (0, 0, 0, -len(x) % 4)) for v in (x, gates))
    x_of, gates_of = (v.unflatten(0, (-1, 4)) for v in padded)  # [documents, 4, ...]
    gates_of = (gates_of.unflatten(2, gates.shape[1:]) + wide(bias)).sigmoid()
    i, r = (gate.flatten(2) for gate in gates_of.unbind(3))
    log = -8 * r * F.softplus(wide(decay))
    state, outputs = i[:, 0] * x_of[:, 0], []
    for t in range(4):
        if t:
            root = (-torch.expm1(2 * log[:, t])).sqrt()
            state = log[:, t].exp() * state + root * i[:, t] * x_of[:, t]
        outputs.append(state)
    return torch.stack(outputs, 1).flatten(0, 1)[: len(x)].view(x.shape).to(x.dtype)


def eager_gated_short_conv(x, weight, bias):
    before, after, u = x.chunk(3, dim=-1)
    return after * eager_short_conv(before * u, weight, bias)


def eager_turn(x, cos, sin, interleaved):
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        half_turned = torch.stack([-b, a], -1).flatten(-2)
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        a, b = turned.chunk(2, -1)
        half_turned = torch.cat([-b, a], -1)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return torch.cat([turned * cos + half_turned * sin, rest], -1)


def eager_split(qkv, cos, sin, interleaved):
    q, k, v = qkv.unflatten(-1, (5, -1)).split([3, 1, 1], 1)
    return eager_turn(q, cos, sin, interleaved), eager_turn(k, cos, sin, interleaved), v


def eager_split_norm(qkv, q_weight, k_weight, cos, sin, per_head, offset, cast):
    q, k, v = qkv.unflatten(-1, (5, -1)).split([3, 1, 1], 1)

    def norm(x, weight):
        rows = x if per_head else x.flatten(1)
        return eager_rms_norm(rows, weight, 1e-5, offset, cast).view(x.shape)

    return *(eager_turn(norm(x, w), cos, sin, False) for x, w in ((q, q_weight), (k, k_weight))), v


def eager_split_norm_last(qkv, cos, sin):
    q, k, v = eager_split(qkv, cos, sin, True)
    ones = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
    return *(eager_rms_norm(x, ones, 1e-5, 0.0, "llama") for x in (q, k)), v


def halves(x):
    return x.chunk(2, -1)


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def labels_of(x, vocab):
    """Labels [T], some of them ignored, computed from x [T, ...] so that they are the same in every dtype."""
    first = x.detach()[:, 0]
    labels = torch.full_like(first, vocab - 1, dtype=torch.long)
    return labels.masked_fill(first > 0, vocab // 2).masked_fill(first > 1, -100)


def eager_cross_entropy(x):
    return F.cross_entropy(wide(x), labels_of(x, x.shape[1]), reduction="none")


def eager_capped_cross_entropy(x, softcap, smoothing, z_loss):
    labels, z = labels_of(x, x.shape[1]), softcap * torch.tanh(wide(x) / softcap)
    losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    return losses + torch.where(labels < 0, 0.0, z_loss * z.logsumexp(1).square())


def eager_kl(student, teacher):
    log_p, log_q = wide(teacher).log_softmax(-1), wide(student).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def eager_jsd(student, teacher, beta):
    p, q = wide(teacher).softmax(-1), wide(student).softmax(-1)
    mixture = beta * p + (1 - beta) * q
    return (beta * (p * (p / mixture).log()) + (1 - beta) * (q * (q / mixture).log())).sum(-1)


def logits_of(x, weight):
    return wide(x) @ wide(weight).T


def eager_log_probs(x, weight):
    return log_probs_of(labels_of(x, len(weight)), logits_of(x, weight))


def log_probs_of(labels, logits):
    """Log-probabilities of the labels, and entropies; zero for rows without a label."""
    log_p = logits.log_softmax(-1)
    valid = labels >= 0
    chosen = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen * valid, entropy * valid


def eager_experts(x, weights, gate_up, down):
    hidden = torch.einsum("th,eih->tei", x, gate_up)
    gate, up = hidden.chunk(2, -1)
    rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    chosen = experts_of(weights, len(down))[..., None].expand(-1, -1, x.shape[1])
    return (weights[..., None] * rows.gather(1, chosen)).sum(1)


def eager_plain_experts(x, weights, up, down):
    rows = torch.einsum("tei,ehi->teh", torch.einsum("th,eih->tei", x, up).relu().square(), down)
    chosen = experts_of(weights, len(down))[..., None].expand(-1, -1, x.shape[1])
    return (weights[..., None] * rows.gather(1, chosen)).sum(1)


def eager_experts_of_weighted(x, weights, gate_up, down):
    chosen = experts_of(weights, len(down)).long()
    hidden = torch.einsum("tkih,tkh->tki", gate_up[chosen], weights[..., None] * x[:, None])
    gate, up = hidden.chunk(2, -1)
    return torch.einsum("tkhi,tki->th", down[chosen], F.silu(gate) * up)


def eager_clamped_swiglu(x, alpha, limit, added=1):
    gate, up = halves(x)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + added) * (gate * torch.sigmoid(alpha * gate))


def eager_capped_swiglu(x, limit):
    gate, up = halves(x)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def eager_sparse_geglu(x, deviations):
    gate, up = halves(x)
    cutoff = gate.mean(-1, keepdim=True) + deviations * gate.std(-1, keepdim=True, unbiased=False)
    return F.gelu(F.relu(gate - cutoff), approximate="tanh") * up


def eager_clamped_experts(x, weights, gate_up, down, gate_up_bias, down_bias, alpha, limit):
    hidden = torch.einsum("th,eih->tei", x, gate_up) + gate_up_bias
    rows = torch.einsum("tei,ehi->teh", eager_clamped_swiglu(hidden, alpha, limit), down) + down_bias
    chosen = experts_of(weights, len(down))[..., None].expand(-1, -1, x.shape[1])
    return (weights[..., None] * rows.gather(1, chosen)).sum(1)


def experts_of(weights, num_experts):
    """Two experts per token, chosen by the sign of its first weight."""
    first = (weights.detach()[:, :1] > 0).long()
    return torch.cat([first, first + num_experts // 2], -1)


def eager_route(x):
    weights = wide(x).softmax(-1).topk(min(2, x.shape[1])).values
    return weights / weights.sum(-1, keepdim=True)


def eager_attention(q, k, v, sinks):
    document = torch.arange(len(q), device=q.device) // 4
    visible = (document[:, None] == document).tril() & ~(document[:, None] == document).tril(-3)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = 2.0 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 / 2.0)
    scores = scores.masked_fill(~visible, float("-inf"))
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", wide(scores).softmax(-1).to(q.dtype)[..., : len(k)], v)


def eager_xielu(x, alpha_p, alpha_n, beta, eps):
    positive, negative = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.min(x, eps)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + beta * x
