"""Parakeet's encoder: relative positions, batch norms, and clips whose last token is a frame of padding."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu
from pairs import beyond_bound, relative_distance
from scenes import make_pair

from liger_models.architectures import find_architecture
from liger_models.architectures.audio_encoders.parakeet import TINY
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, DataError
from liger_models.layers.audio.conformer import ConformerEncoder
from liger_models.layers.audio.sounds import Sounds, take_sounds
from liger_models.layers.conformer.clip_attention import by_key
from liger_models.layers.recompute import activation_memory
from liger_models.layers.recompute.activation_memory import Kept


@pytest.fixture
def family() -> str:
    return "nemotron_h_omni"


def padded(pair, columns):
    """Spectrograms as the processor gives them: zeros after each, and in one more column."""
    features = torch.randn(len(columns), max(columns) + 1, pair.ours.spec.audio.bins)
    mask = torch.arange(features.shape[1]) < torch.tensor(columns)[:, None]
    return features * mask[..., None], mask


def test_a_clip_of_whole_frames_ends_with_one_of_padding_as_alone_in_the_reference(pair):
    """Features and every gradient of several clips together, four columns of which make a frame."""
    columns = [16, 7, 32, 4, 1]
    features, mask = padded(pair, columns)
    sounds = Sounds(pair.ours.spec.audio, features, columns)
    assert (sounds.frames, sounds.unseen) == ([5, 2, 9, 2, 1], [1, 0, 1, 1, 0])
    pair.ours.zero_grad()
    pair.reference.zero_grad()
    found = pair.ours.audio(sounds)
    cotangent = torch.randn_like(found)
    found.backward(cotangent)
    distances = {}
    pairs = zip(features, mask, found.split(sounds.counts()), cotangent.split(sounds.counts()), strict=True)
    for number, (clip, shown, own, direction) in enumerate(pairs):
        count = columns[number] + 1
        alone = pair.reference.get_audio_features(clip[None, :count], shown[None, :count]).pooler_output
        distances[str(number)] = relative_distance(own, alone)
        alone.backward(direction)
    expected = {n: p.grad for n, p in pair.reference.named_parameters() if p.grad is not None}
    gradients = pair.gradients_of_ours()
    assert gradients.keys() == expected.keys()
    for name, x in gradients.items():
        if "k_proj.bias" not in name:  # it moves all scores of a query alike: rounding only
            distances[name] = relative_distance(x, expected[name])
    assert not beyond_bound(distances)


def test_clips_have_as_many_tokens_as_the_processor_counts():
    transformers = pytest.importorskip("transformers")
    processing = pytest.importorskip("transformers.models.nemotron_h_omni.processing_nemotron_h_omni")
    extractor = transformers.ParakeetFeatureExtractor(feature_size=128)
    samples = [48_777, 12_800, 176_000, 10_240]
    waves = [torch.randn(n).numpy() for n in samples]
    given = extractor(waves, sampling_rate=16_000, return_tensors="pt")
    tiny = find_architecture("nemotron_h_omni").tiny
    sounds = {**tiny["audio_config"], "num_mel_bins": 128, "subsampling_factor": 8}
    config = HFConfig.load({**tiny, "audio_config": sounds})
    spec = find_architecture("nemotron_h_omni").spec(config).audio
    keywords = {"input_features": given.input_features, "input_features_mask": given.attention_mask}
    found = take_sounds(spec, keywords)
    count = processing.NemotronH_Omni_Reasoning_V3Processor._estimate_audio_num_embeddings
    processor = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=8)
    assert found.counts() == [count(processor, n) for n in samples]
    assert found.unseen == [1, 1, 0, 1]


def test_a_clip_without_a_column_for_its_frame_of_padding_is_refused(pair):
    call = pair.scene([2, 3])
    features, _ = padded(pair, [15])
    call |= {"input_features": features, "input_features_mask": torch.ones(1, 16, dtype=torch.bool)}
    with pytest.raises(DataError, match=r"mask\[0\] shows all 16 columns; expected one column of padding"):
        pair.ours(**call)


def test_batch_norms_use_stored_moments_in_training_and_keep_them(pair):
    """So a clip's features do not depend on the other clips of its batch."""
    columns = [16, 7, 32]
    features, _ = padded(pair, columns)
    spec, norm = pair.ours.spec.audio, pair.ours.audio.encoder.layers[0].conv.batch_norm
    before = {name: x.clone() for name, x in norm.state_dict().items()}
    assert pair.ours.training
    together = pair.ours.audio(Sounds(spec, features, columns))
    alone = [pair.ours.audio(Sounds(spec, features[i : i + 1], [n])) for i, n in enumerate(columns)]
    assert relative_distance(together, torch.cat(alone)) <= 1e-6
    together.sum().backward()
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())
    assert norm.weight.grad.abs().sum() > 0


def test_scores_by_distance_are_moved_to_their_keys():
    for frames in (1, 2, 5):
        x = torch.randn(3, frames, 2 * frames - 1)
        found = by_key(x)
        for query in range(frames):
            for key in range(frames):
                assert torch.equal(found[:, query, key], x[:, query, frames - 1 - (query - key)])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_mel_bins", 10, "expected a multiple of the subsampling_factor, 4"),
        ("subsampling_factor", 6, "must be a power of two"),
        ("conv_kernel_size", 4, "expected an odd number"),
        ("num_attention_heads", 5, "expected an even multiple"),
        ("subsampling_conv_stride", 3, "must be 2"),
        ("layerdrop", 0.1, "layerdrop"),
    ],
)
def test_a_config_that_the_reference_cannot_run_or_that_drops_is_refused(key, value, message):
    sounds = {**TINY, "projection_hidden_size": 20, key: value}
    with pytest.raises(ConfigError, match=message):
        make_pair("nemotron_h_omni", {"audio_config": sounds})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
@pytest.mark.parametrize("family", ["nemotron_h_omni", "granite_speech"])
def test_a_layer_reports_the_bytes_it_keeps(level, pair):
    def kept(layers: int) -> tuple[int, ConformerEncoder, int]:
        spec = replace(pair.ours.spec.audio, blocks=pair.ours.spec.audio.blocks[:1] * layers)
        encoder = ConformerEncoder(spec)
        encoder.load_state_dict(pair.ours.audio.encoder.state_dict(), strict=False)
        encoder.set_activation_memory(level)
        saved = weakref.WeakSet()

        class Noted(Kept):
            def __init__(self, tensor):
                super().__init__(tensor)
                saved.add(self)

        clip = Sounds(spec, torch.randn(1, 126, spec.bins), [125])
        with as_on_a_gpu(), LiveBytes(zero=True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(activation_memory, "Kept", Noted)
            out = encoder(clip)
        assert out.requires_grad
        parameters = {tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers())}
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in saved}
        found = sum(size for place, size in storages.items() if place not in parameters)
        return found, encoder, clip.frames[0]

    (one, encoder, frames), (two, *_) = kept(1), kept(2)
    conv, relative = encoder.layers[0].conv, hasattr(encoder.layers[0].self_attn, "relative_k_proj")
    rows_between_clips = 4 * conv.channels * (conv.spec.width // 2)
    missing_distance = 4 * encoder.spec.hidden_size * relative
    expected = frames * encoder.layers[0].activation_bytes(level, 4)
    assert two - one == expected + rows_between_clips - missing_distance
