"""Granite Speech: padding that is encoded, blocks of attention, and adapters that hear."""

from __future__ import annotations

import copy

import pytest
import torch
from clips import DOCUMENTS
from pairs import BOUND, beyond_bound, randomise, relative_distance
from scenes import make_pair

import liger_models
from liger_models.convert.errors import CheckpointError, ConfigError, DataError
from liger_models.images.sounds import Sound


@pytest.fixture
def family() -> str:
    return "granite_speech"


def spoken(pair, columns, tokens):
    """Random features of clips, and the mask of their tokens."""
    audio = pair.ours.spec.audio
    features = torch.randn(len(tokens), columns, audio.bins)
    most = -(-columns // audio.projector.window) * audio.projector.queries
    mask = torch.arange(most) < torch.tensor(tokens)[:, None]
    ids = torch.full((1, sum(tokens)), audio.audio_id)
    text = torch.randint(20, 60, (1, 4))
    return {"input_ids": torch.cat([ids, text], 1), "input_features": features, "input_features_mask": mask}


@pytest.mark.parametrize("columns", [1, 5, 6, 13, 20])
def test_clips_that_end_within_a_block_or_a_window_match_the_reference(columns, pair):
    """Blocks have five frames, and windows six, which make three tokens."""
    most = -(-columns // 6) * 3
    call = spoken(pair, columns, [most, 3])
    call["labels"] = call["input_ids"].masked_fill(call["input_ids"] == 3, -100)
    distances = pair.run_ours(**call).distances(pair.run_reference(**call))
    assert any("rel_pos_emb" in name for name in distances)
    assert not beyond_bound(distances)


def test_padding_is_encoded_as_in_the_reference(pair):
    """A clip's features depend on the columns after it, also where no token is made of them."""
    call = spoken(pair, 20, [3, 12])
    with torch.no_grad():
        before = pair.ours(**call, return_logits=True).logits
        call["input_features"][0, 8:] += 1.0
        after = pair.ours(**call, return_logits=True).logits
        expected = pair.reference(**call, use_cache=False).logits
    assert relative_distance(after, expected) <= BOUND
    assert relative_distance(after, before) > 1e-3


def test_scores_of_characters_are_added_after_the_middle_layer(pair):
    encoder = pair.ours.audio.encoder
    kept = encoder.out_mid.weight.detach().clone()
    call = pair.scene(*DOCUMENTS)
    with torch.no_grad():
        before = pair.ours(**call, return_logits=True).logits
        encoder.out_mid.weight.zero_()
        after = pair.ours(**call, return_logits=True).logits
        encoder.out_mid.weight.copy_(kept)
    assert relative_distance(after, before) > 1e-3


def test_logits_are_not_divided_by_logits_scaling_as_in_the_reference(pair):
    assert pair.config["text_config"]["logits_scaling"] != 1.0
    assert pair.ours.spec.logit_scale == 1.0


def test_a_mask_that_does_not_fit_is_refused(pair):
    call = spoken(pair, 13, [4, 3])
    with pytest.raises(
        DataError, match=r"mask\[0\] shows 4 tokens; expected a multiple of 3, .* of 6 columns"
    ):
        pair.ours(**call)
    call = spoken(pair, 13, [6, 3])
    call["input_features_mask"] = call["input_features_mask"][:, :-1]
    with pytest.raises(DataError, match=r"must be \[2, 9\], by input_features; found \[2, 8\]"):
        pair.ours(**call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_config": {"context_size": 7}}, "expected at most max_pos_emb, 6"),
        ({"encoder_config": {"conv_kernel_size": 4}}, "expected an odd number"),
        ({"encoder_config": {"dropout": 0.1}}, "dropout"),
        ({"projector_config": {"hidden_dropout_prob": 0.1}}, "hidden_dropout_prob"),
        ({"projector_config": {"encoder_hidden_size": 25}}, "expected 24, the encoder's width"),
        ({"projector_config": {"use_qformer_text_input": True}}, "use_qformer_text_input"),
        ({"downsample_rate": 4}, "expected a multiple of the latter"),
    ],
)
def test_a_config_that_the_reference_cannot_run_or_that_drops_is_refused(changes, message, pair):
    config = copy.deepcopy(pair.config)
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        liger_models.from_config(config)


def test_an_adapter_next_to_the_weights_hears_as_in_transformers(pair, hf, tmp_path):
    """`generate` switches it off for text alone, and on for sounds."""
    peft = pytest.importorskip("peft")
    pair.reference.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(pair.reference), lora)
    adapted.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"an adapter|PEFT adapter .* load both with liger_models\.hf"):
        liger_models.from_hub(tmp_path / "base")
    theirs, ours = (
        kind.from_pretrained(tmp_path / "base").eval()
        for kind in (type(pair.reference), hf.classes_of("granite_speech").causal_lm)
    )
    call = pair.scene(*DOCUMENTS, padding="left")
    del call["labels"]
    text = {"input_ids": torch.randint(20, 60, (2, 9))}
    options = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None, "max_new_tokens": 4}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    heard = pair.reference(**call, use_cache=False).logits[:, -1]
    found = []
    for given in (call, text, call):
        expected, made = (torch.stack(model.generate(**given, **options).logits) for model in (theirs, ours))
        assert relative_distance(made, expected) <= BOUND
        with torch.no_grad():  # the switch stays where it was
            assert relative_distance(ours(**given).logits, theirs(**given, use_cache=False).logits) <= BOUND
        found.append(made)
    assert relative_distance(found[0][0], heard) > 1e-2
    without = pair.reference.eval().generate(**text, **options).logits
    pair.reference.train()
    assert relative_distance(found[1], torch.stack(without)) <= BOUND


def test_plus_reads_earlier_layers_too():
    """The sum with the scores of characters is part of the middle layer's state."""
    pair = make_pair("granite_speech_plus")
    call = pair.scene([2, Sound(13), 3])
    assert pair.ours.spec.audio.states == (0, 1)
    assert not beyond_bound(pair.run_ours(**call).distances(pair.run_reference(**call)))
    randomise(pair.ours.audio.encoder, torch.Generator().manual_seed(5))
    assert beyond_bound(pair.run_ours(**call).distances(pair.run_reference(**call)))
