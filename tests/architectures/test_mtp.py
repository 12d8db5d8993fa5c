"""Multi-token prediction against its formula, computed token by token in float64 from checkpoint tensors by
name, and its tensors in checkpoints. transformers' models ignore these modules.
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from randomised import randomise
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError

FAMILIES = [
    name
    for vision in (False, True)
    for name in list_architectures(vision)
    if find_architecture(name).mtp is not None
]
EPS, WEIGHT = 1e-3, 0.3

# -- the formula


def rms(x, weight, eps):
    return x * (x.square().mean() + eps).rsqrt() * weight


def rotated(x, position, *, interleaved):
    """Rotate pairs of a vector by position * 10000^(-2i / n)."""
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    pairs = x.view(half, 2).unbind(1) if interleaved else (x[:half], x[half:])
    a, b = pairs
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def attended(queries, keys, values, scale):
    """[heads, d] and one [heads, d] for each visible token -> the heads' outputs, one after another."""
    scores = torch.stack([(queries * key).sum(1) for key in keys]) * scale  # [visible, heads]
    return (scores.softmax(0)[..., None] * torch.stack(values)).sum(0).flatten()


def mlp(x, w, name):
    return w(f"{name}.down_proj") @ (F.silu(w(f"{name}.gate_proj") @ x) * (w(f"{name}.up_proj") @ x))


class DeepSeek:
    """DeepSeek-V3's layer: latent attention and experts in groups."""

    changes: ClassVar = {"num_nextn_predict_layers": 2}

    def names(self, k):
        layer = f"model.layers.{3 + k}."
        return layer, f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}shared_head.norm"

    def norm(self, x, weight):
        return rms(x, weight, EPS)

    def attention(self, x, w, position, cache):
        heads, nope, rope, rank = 4, 10, 6, 20
        eps = 1e-6  # of the norms of latents
        q = w("self_attn.q_b_proj") @ rms(w("self_attn.q_a_proj") @ x, w("self_attn.q_a_layernorm"), eps)
        latent = w("self_attn.kv_a_proj_with_mqa") @ x
        kv = w("self_attn.kv_b_proj") @ rms(latent[:rank], w("self_attn.kv_a_layernorm"), eps)
        q, kv = q.view(heads, nope + rope), kv.view(heads, -1)
        turned = rotated(latent[rank:], position, interleaved=True).expand(heads, rope)
        q = torch.stack([torch.cat([h[:nope], rotated(h[nope:], position, interleaved=True)]) for h in q])
        cache.append((torch.cat([kv[:, :nope], turned], 1), kv[:, nope:]))
        return w("self_attn.o_proj") @ attended(q, *zip(*cache, strict=True), (nope + rope) ** -0.5)

    def feed_forward(self, x, w):
        scores = (w("mlp.gate") @ x).sigmoid()
        groups = (scores + w("mlp.gate.e_score_correction_bias")).view(4, 2)
        allowed = groups.sum(1).topk(2).indices
        ranked = torch.full_like(groups, -math.inf)
        ranked[allowed] = groups[allowed]
        chosen = ranked.flatten().topk(3).indices
        weights = 1.7 * scores[chosen] / (scores[chosen].sum() + 1e-20)
        parts = [p * mlp(x, w, f"mlp.experts.{e}") for p, e in zip(weights, chosen.tolist(), strict=True)]
        return sum(parts) + mlp(x, w, "mlp.shared_experts")


class Qwen:
    """Qwen3.5's layer: gated attention with QK-norm and half-rotated heads, and an MLP."""

    changes: ClassVar = {"attention_bias": False, "rms_norm_eps": EPS}

    def names(self, k):
        return "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"

    def norm(self, x, weight):
        return rms(x, 1 + weight, EPS)

    def attention(self, x, w, position, cache):
        heads, key_heads, dim = 4, 2, 16
        q, gate = (w("self_attn.q_proj") @ x).view(heads, 2 * dim).split(dim, 1)
        k, v = ((w(f"self_attn.{n}_proj") @ x).view(key_heads, dim) for n in "kv")

        def turned(head, norm):
            head = self.norm(head, w(f"self_attn.{norm}_norm"))
            return torch.cat([rotated(head[: dim // 2], position, interleaved=False), head[dim // 2 :]])

        q = torch.stack([turned(head, "q") for head in q])
        k = torch.stack([turned(head, "k") for head in k])
        cache.append((k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)))
        out = attended(q, *zip(*cache, strict=True), dim**-0.5)
        return w("self_attn.o_proj") @ (out * gate.flatten().sigmoid())

    def feed_forward(self, x, w):
        return mlp(x, w, "mlp")


ORACLES = {"deepseek_v3": DeepSeek(), "qwen3_5_text": Qwen()}


def losses_by_formula(model, oracle, hidden, ids, labels, bounds):
    """Main loss and the loss of further tokens, sums over counted labels. All tensors by checkpoint name.

    hidden [T, H], ids and labels [T]; documents between `bounds`.
    """
    tensors = {}
    for name, expression in model.weight_map().items():
        tensors |= expression.write(model.saved_tensors()[name])
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    depth = oracle.changes.get("num_nextn_predict_layers", 1)
    main = further = 0.0
    for start, end in itertools.pairwise(bounds):
        states = list(hidden[start:end])
        for k in range(depth + 1):
            if k:
                layer, *others = oracle.names(k - 1)
                enorm, hnorm, projection, last = (tensors[f"{name}.weight"] for name in others)

                def w(name, layer=layer):
                    return tensors.get(f"{layer}{name}.weight", tensors.get(f"{layer}{name}"))

                cache, found = [], []
                for t in range(end - start - k):
                    e = embedding[ids[start + t + k]]
                    x = projection @ torch.cat([oracle.norm(e, enorm), oracle.norm(states[t], hnorm)])
                    x = x + oracle.attention(oracle.norm(x, w("input_layernorm")), w, t, cache)
                    x = x + oracle.feed_forward(oracle.norm(x, w("post_attention_layernorm")), w)
                    found.append(oracle.norm(x, last))
                states = found
            for t, h in enumerate(states[: end - start - k - 1]):
                if (label := labels[start + t + k + 1]) != -100:
                    loss = -(head @ h).log_softmax(0)[label]
                    main, further = (main, further + loss / depth) if k else (main + loss, further)
    return main, further


def made(family, **options):
    torch.manual_seed(0)
    config = {**find_architecture(family).tiny, **ORACLES[family].changes}
    model = liger_models.from_config(config, mtp=True, dtype="float64", device="cpu", **options)
    randomise(model, torch.Generator().manual_seed(1))
    for buffer in model.buffers():  # correction biases of experts
        if buffer.is_floating_point():
            torch.nn.init.normal_(buffer, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


CALLS = {
    "packed": ([0, 6, 7, 9, 16], {"cu_seqlens": torch.tensor([0, 6, 7, 9, 16])}),
    "padded": ([0, 8, 13], {"attention_mask": torch.tensor([[1] * 8, [0] * 3 + [1] * 5])}),
}


def drawn(model):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, model.spec.vocab_size, (2, 8), generator=generator)
    return ids, ids.masked_fill(torch.rand(2, 8, generator=generator) < 0.25, -100)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", ORACLES)
def test_losses_and_all_gradients_follow_the_formula_at_every_level(family, call):
    model, (bounds, documents) = made(family), CALLS[call]
    ids, labels = drawn(model)
    hidden = model(ids, output_hidden_states=True, return_logits=False, **documents).hidden_states[-1]
    kept = documents.get("attention_mask", torch.ones(2, 8)).flatten().bool()
    flat = [x.flatten(0, 1)[kept] for x in (hidden, ids, labels)]
    main, further = losses_by_formula(model, ORACLES[family], *flat, bounds)
    count = sum(int((flat[2][a + 1 : b] != -100).sum()) for a, b in itertools.pairwise(bounds))
    expected = {"loss": (main + WEIGHT * further) / count, "mtp_loss": further / count}
    expected["loss"].backward()
    expected |= {name: p.grad for name, p in model.named_parameters()}
    for level in ("all", "lean", "mlp", "checkpoint", "tiled", "offload"):
        model.zero_grad()
        model.set_activation_memory(level)
        output = model(ids, labels=labels, mtp_weight=WEIGHT, **documents)
        output.loss.backward()
        # All is float64 but the rotary tables, whose angles of up to 8 are off by up to 8 * 2^-24, or 5e-7.
        found = {"loss": output.loss, "mtp_loss": output.mtp_loss}
        found |= {name: p.grad for name, p in model.named_parameters()}
        for name, value in found.items():
            assert (value - expected[name]).norm() < 1e-6 * expected[name].norm(), (level, name)


def test_micro_batches_add_up_to_the_whole_batch():
    model = made("qwen3_5_text")
    ids, labels = drawn(model)
    gradients, losses = [], []
    for parts in (2, 1):
        model.zero_grad()
        count = int((labels[:, 1:] != -100).sum())
        loss = 0.0
        for rows in range(0, 2, parts):
            part = slice(rows, rows + parts)
            options = {"mtp_weight": WEIGHT, "num_items_in_batch": count}
            output = model(ids[part], labels=labels[part], **options)
            output.loss.backward()
            loss += output.mtp_loss
        gradients.append([p.grad for p in model.parameters()])
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0])
    for whole, of_parts in zip(*gradients, strict=True):
        torch.testing.assert_close(of_parts, whole, rtol=1e-9, atol=1e-12)


def test_documents_too_short_for_a_target_have_no_further_loss():
    model = made("deepseek_v3")
    ids, _ = drawn(model)
    output = model(ids, labels=ids, cu_seqlens=torch.arange(0, 17, 2), mtp_weight=WEIGHT)
    output.loss.backward()
    assert output.mtp_loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.mtp.parameters())


def test_the_routers_loss_leaves_the_modules_out():
    torch.manual_seed(0)
    config = {**find_architecture("qwen3_next").tiny, "output_router_logits": True}
    model = liger_models.from_config(config, mtp=True, device="cpu")
    ids, labels = drawn(model)
    plain, output = model(ids, labels=labels), model(ids, labels=labels, mtp_weight=WEIGHT)
    torch.testing.assert_close(output.loss, plain.loss + WEIGHT * output.mtp_loss)


def test_the_modules_are_trained_alone():
    model = made("deepseek_v3")
    model.freeze(train_only=["mtp"])
    ids, labels = drawn(model)
    model(ids, labels=labels, mtp_weight=WEIGHT).loss.backward()
    assert all((p.grad is not None) is name.startswith("mtp.") for name, p in model.named_parameters())


# -- checkpoints


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder, family):
    """Write a checkpoint in bfloat16 and float32 with the modules; those of DeepSeek's kind have copies of
    the embedding and the head. Return the model.
    """
    torch.manual_seed(0)
    config = find_architecture(family).tiny
    model = randomise(liger_models.from_config(config, mtp=True, device="cpu"))
    for p in model.parameters():
        if p.ndim > 1:
            p.data = p.data.bfloat16()
    model.save_pretrained(folder, dtype="parameters")
    if family in ("deepseek_v3", "glm4_moe"):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, file, {"format": "pt"})
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_are_loaded_or_carried_and_saved_byte_for_byte(family, tmp_path):
    model = write(tmp_path / "in", family)
    loaded = liger_models.from_hub(tmp_path / "in", mtp=True)
    assert loaded.mtp.keys() == model.mtp.keys()
    for name, value in model.saved_tensors().items():
        assert torch.equal(loaded.saved_tensors()[name], value), name
    assert not loaded.source.carried
    carrying = liger_models.from_hub(tmp_path / "in")
    assert carrying.mtp is None
    for number, one in enumerate((loaded, carrying)):
        one.save_pretrained(tmp_path / f"out{number}")
        assert files(tmp_path / f"out{number}") == files(tmp_path / "in")
        sent, stored = dict(one.checkpoint_tensors()), load_file(tmp_path / "in/model.safetensors")
        assert sent.keys() == stored.keys()
        assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())


def test_copies_in_modules_follow_the_trained_embedding_and_head(tmp_path):
    write(tmp_path / "in", "deepseek_v3")
    model = liger_models.from_hub(tmp_path / "in", mtp=True)
    for p in model.parameters():
        p.data += 1
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(saved["model.layers.3.embed_tokens.weight"], model.embed_tokens.weight)
    assert torch.equal(saved["model.layers.3.shared_head.head.weight"], model.lm_head.weight)
    assert torch.equal(saved["model.layers.3.eh_proj.weight"], model.mtp["3"].eh_proj.weight)

    saved["model.layers.3.embed_tokens.weight"] += 1
    save_file(saved, tmp_path / "out/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.3\.embed_tokens\.weight' must repeat"):
        liger_models.from_hub(tmp_path / "out", mtp=True)


def test_new_tokens_get_rows_in_the_copies(tmp_path):
    write(tmp_path / "in", "deepseek_v3")
    model = liger_models.from_hub(tmp_path / "in", mtp=True, new_tokens=range(131, 140))
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(saved["model.layers.3.shared_head.head.weight"], saved["lm_head.weight"])
    assert len(saved["lm_head.weight"]) == 140


def test_a_text_part_has_the_modules(tmp_path):
    write(tmp_path / "in", "qwen3_5")
    with pytest.warns(UserWarning, match="only the text part"):
        model = liger_models.from_hub(tmp_path / "in", mtp=True, text_only=True)
    assert not any(name.startswith("mtp.") for name in model.left_out)
    model.save_pretrained(tmp_path / "out")
    again = liger_models.from_hub(tmp_path / "out", mtp=True)
    assert torch.equal(again.mtp["0"].eh_proj.weight, model.mtp["0"].eh_proj.weight)


@pytest.mark.parametrize("family", ["bailing_hybrid", "qwen3_5_moe"])
def test_every_form_of_the_modules_is_told_apart(family, tmp_path):
    """Two names of the last norm, and separate experts after packed ones."""
    model = write(tmp_path / "any", family)
    names = set()
    for number, layout in enumerate(model.architecture.layouts):
        model.layout, folder = layout, tmp_path / f"in{number}"
        model.save_pretrained(folder, dtype="parameters")
        liger_models.from_hub(folder, mtp=True).save_pretrained(tmp_path / f"out{number}")
        assert files(tmp_path / f"out{number}") == files(folder)
        names.add(frozenset(load_file(folder / "model.safetensors")))
    assert len(names) == len(model.architecture.layouts)


# -- refusals


def test_calls_without_a_loss_of_further_tokens_are_refused():
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture("qwen3_5_text").tiny, mtp=True, device="cpu")
    ids, labels = drawn(model)
    with pytest.raises(DataError, match="pass labels or shift_labels"):
        model(ids, mtp_weight=0.1)
    with pytest.raises(ValueError, match=r"mtp_weight is -0\.1"):
        model(ids, labels=labels, mtp_weight=-0.1)
    tree = {"cu_seqlens": torch.tensor([0, 4, 8, 16]), "parents": [-1, 0, 0]}
    model = liger_models.from_config(find_architecture("deepseek_v3").tiny, mtp=True, device="cpu")
    with pytest.raises(DataError, match="repeat their prefix in each document"):
        model(ids, labels=labels, mtp_weight=0.1, **tree)
    carrying = liger_models.from_config(find_architecture("qwen3_5_text").tiny, device="cpu")
    with pytest.raises(DataError, match="loaded without modules for multi-token prediction"):
        carrying(ids, labels=labels, mtp_weight=0.1)


def test_models_that_cannot_have_the_modules_are_refused():
    def refuses(error, message, family, *, labels=None, **config):
        tiny = {**find_architecture(family).tiny, **config}
        with pytest.raises(error, match=message):
            liger_models.from_config(tiny, mtp=True, labels=labels, device="meta")

    refuses(UnsupportedModelError, "'llama' have no modules for multi-token prediction", "llama")
    refuses(ConfigError, "labels or head=False asks for a model that does not", "glm4_moe", labels=2)
    refuses(ConfigError, "num_nextn_predict_layers is 0", "glm4_moe", num_nextn_predict_layers=0)
    refuses(ConfigError, "mtp needs exactly 1", "qwen3_5_text", mtp_num_hidden_layers=2)
    linear = {"layer_types": ["linear_attention"] * 3}
    refuses(ConfigError, "no layer has full attention", "qwen3_5_text", **linear)
    dedicated = {"mtp_use_dedicated_embeddings": True}
    refuses(ConfigError, "mtp_use_dedicated_embeddings is true", "qwen3_5_text", **dedicated)
