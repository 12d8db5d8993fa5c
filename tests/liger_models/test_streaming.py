"""`stream_weights` yields a checkpoint's bytes, all or what has changed, in one process and in ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from ranks import run_ranks
from safetensors.torch import load_file

import liger_models
from liger_models import CheckpointError, ConfigError, stream_weights
from liger_models.architectures import find_architecture
from liger_models.convert.checkpoints.fingerprint import _multipliers, fingerprints

RANK = Path(__file__).with_name("streaming_rank.py")


def make(family="llama", **changes):
    torch.manual_seed(0)
    model = liger_models.from_config({**find_architecture(family).tiny, **changes})
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model


def saved(model, folder, **options):
    """The tensors that `save_pretrained` writes."""
    model.save_pretrained(folder, **options)
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def assert_same(found, expected):
    found = dict(found)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_a_stream_has_the_bytes_that_save_pretrained_writes(family, tmp_path):
    model = make(family)
    saved(model, tmp_path / "source", dtype="bfloat16")
    model = liger_models.from_hub(tmp_path / "source", dtype=torch.float32)
    for number, dtype in enumerate((None, "float16", "parameters")):
        expected = saved(model, tmp_path / str(number), dtype=dtype)
        assert_same(stream_weights(model, dtype=dtype), expected)
        buckets = [*stream_weights(model, dtype=dtype).buckets("20KB")]
        assert len(buckets) > 1
        assert_same((pair for bucket in buckets for pair in bucket.tensors.items()), expected)
        for bucket in buckets:
            own = bucket.buffer.untyped_storage().data_ptr()
            assert {x.untyped_storage().data_ptr() for x in bucket.tensors.values()} == {own}
            assert bucket.buffer.numel() <= 20_000 or len(bucket.tensors) == 1


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gpt2"])
def test_a_later_stream_follows_a_model_that_has_changed(family, tmp_path):
    model = make(family)

    def check(number):
        assert_same(stream_weights(model), saved(model, tmp_path / str(number)))

    check(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    check(1)
    for p in model.parameters():  # other memory, with other strides
        p.data = p.data.T.clone().T if p.dim() == 2 else p.data.clone()
    check(2)
    model.split_projections()
    check(3)
    model.fuse_projections()
    check(4)


@pytest.mark.parametrize("quantization", ["fp8-block", "nvfp4"])
def test_a_quantised_stream_has_the_bytes_that_save_pretrained_writes(quantization, tmp_path):
    model = make(hidden_size=128, intermediate_size=256, head_dim=64, num_attention_heads=2)
    expected = saved(model, tmp_path, quantization=quantization, dtype="bfloat16")
    assert_same(stream_weights(model, quantization=quantization, dtype="bfloat16"), expected)


def test_names_for_vllm_are_those_of_published_checkpoints(tmp_path):
    """transformers' own `save_pretrained` may stack experts; published checkpoints of this family do not."""
    model = make("qwen3_moe")
    expected = dict(stream_weights(model))
    stacked = model.architecture.layouts[1]
    model.layout = stacked
    saved(model, tmp_path)
    model = liger_models.from_hub(tmp_path)
    assert model.layout == stacked
    assert any(name.endswith("experts.down_proj") for name, _ in stream_weights(model))
    assert_same(stream_weights(model, names="vllm"), expected)


def test_only_what_has_changed_is_sent_again():
    model = make(tie_word_embeddings=True)
    first = stream_weights(model, track=True)
    assert not dict(stream_weights(model, since=first.token))
    model.layers[0].self_attn.o_proj.weight.data[3, 5] *= -1  # no version counter sees this
    later = stream_weights(model, since=first.token)
    assert [name for name, _ in later] == ["model.layers.0.self_attn.o_proj.weight"]
    assert not dict(stream_weights(model, since=later.token))
    model.layers[0].self_attn.o_proj.weight.data[3, 5] *= -1
    assert not dict(stream_weights(model, since=first.token))
    with pytest.raises(ConfigError, match="other settings"):
        stream_weights(model, dtype="bfloat16", since=first.token)
    with pytest.raises(ConfigError, match="pass track=True"):
        _ = stream_weights(model).token


def test_fingerprints_see_every_bit_of_any_tensor():
    generator = torch.Generator().manual_seed(0)
    for dtype, shape in (
        (torch.bfloat16, (5,)),
        (torch.float32, (3, 7)),
        (torch.uint8, (3,)),
        (torch.int64, ()),
    ):
        tensor = torch.randint(100, shape, generator=generator).to(dtype)
        (before,) = fingerprints([tensor])
        data = tensor.view(-1).view(torch.uint8)
        for place in range(len(data)):
            for bit in range(8):
                data[place] ^= 1 << bit
                assert not torch.equal(fingerprints([tensor])[0], before)
                data[place] ^= 1 << bit
        assert torch.equal(fingerprints([tensor])[0], before)
    rows = torch.randn(6, 5, generator=generator, dtype=torch.bfloat16)
    assert torch.equal(fingerprints([rows[1:, 1:3]])[0], fingerprints([rows[1:, 1:3].clone()])[0])
    assert torch.equal(fingerprints([rows.view(-1)[1:]])[0], fingerprints([rows.view(-1)[1:].clone()])[0])
    assert len(_multipliers(1000, torch.device("cpu")).unique()) == 2000
    # The first output of SplitMix64 with the seed 0, as in its authors' reference program.
    assert int(_multipliers(4, torch.device("cpu"))[0, 0]) == 0xE220A8397B1DCDAF - (1 << 64)


def test_only_a_bucket_and_a_tensor_exist_at_once():
    model = make("qwen3_moe")
    tensors = dict(stream_weights(model, dtype="bfloat16"))
    whole, largest = sum(x.nbytes for x in tensors.values()), max(x.nbytes for x in tensors.values())
    bucket = largest + 4096
    with LiveBytes(model.parameters()) as live:
        for filled in stream_weights(model, dtype="bfloat16").buckets(bucket):
            del filled
    assert live.peak <= bucket + 2 * largest < whole / 4


def adapted():
    peft = pytest.importorskip("peft")
    model = make()
    model.split_projections()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return model, peft.get_peft_model(model, config)


def test_adapters_are_merged_or_alone(tmp_path):
    model, wrapper = adapted()
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged, alone = dict(stream_weights(model)), dict(stream_weights(model, adapter="alone"))
    wrapper.save_pretrained(tmp_path / "adapter")
    files = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # PEFT names the native model's layers, transformers' model has its decoder in `model.`
    assert_same(alone, {name.replace("model.layers", "model.model.layers"): x for name, x in files.items()})
    first = stream_weights(model, adapter="alone", track=True)
    model.layers[1].mlp.down_proj.lora_B.default.weight.data.neg_()
    later = dict(stream_weights(model, adapter="alone", since=first.token))
    assert list(later) == ["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    model.layers[1].mlp.down_proj.lora_B.default.weight.data.neg_()
    token = stream_weights(model, track=True).token
    assert {name.split(".")[-2] for name, _ in stream_weights(model, since=token)} == {"q_proj", "down_proj"}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_same(merged, saved(wrapper.merge_and_unload(), tmp_path / "merged"))


def test_what_cannot_be_streamed_is_refused():
    model = make()
    with pytest.raises(TypeError, match="inside its wrapper"):
        stream_weights(torch.nn.Sequential(model))
    with pytest.raises(ConfigError, match="has no adapters"):
        stream_weights(model, adapter="alone")
    with pytest.raises(ConfigError, match="names='sglang'"):
        stream_weights(model, names="sglang")
    other = make("qwen3_moe")
    other.layout = other.architecture.layouts[1]
    with pytest.raises(ConfigError, match="the form of the checkpoint"):
        stream_weights(other, names="vllm", quantization="as_loaded")
    model, _ = adapted()
    model.norm.weight.requires_grad_()
    with pytest.raises(CheckpointError, match=r"norm\.weight is trained, too"):
        stream_weights(model, adapter="alone")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_stream_their_shards_and_divided_experts(tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 8}
    model = make("qwen3_moe", **sizes, vocab_size=133)
    saved(model, tmp_path / "source")
    model = liger_models.from_hub(tmp_path / "source", device="cpu")
    expected = saved(model, tmp_path / "first", dtype="bfloat16")
    found = run_ranks(RANK, tmp_path)
    for rank in found:
        assert_same(rank["first"], expected)
        assert not rank["none"]
        stack = {name for name in expected if "layers.1.mlp.experts" in name and "down_proj" in name}
        assert rank["changed"].keys() == {"model.norm.weight", *stack}
    model.norm.weight.data[64:] += 1  # the second rank's
    model.layers[1].mlp.experts.down_proj.data[4:] += 1
    changed = dict(stream_weights(model, dtype="bfloat16"))
    for rank in found:
        assert_same(rank["changed"], {name: changed[name] for name in rank["changed"]})
        assert_same(rank["float8"], saved(model, tmp_path / "float8", quantization="fp8-block"))
