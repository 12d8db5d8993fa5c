"""Families with audio encoders as transformers' models."""

from __future__ import annotations

import pytest
import torch
from clips import DOCUMENTS, of_sounds
from pairs import BOUND, relative_distance
from rounding import OtherOrder, beyond_rounding
from ties import clear_of_ties

TARGETS = ["q_proj", "k_proj", "fc1", "embedding_projection"]
OF_KEYS = ("k_proj.bias", ".key.bias")
# A conformer's linear layers are between two clips: PEFT adapts these layers and not the whole.
OF_A_CONFORMER = (
    r".*(language_model.*[qk]_proj|audio_tower.*(linear\d?|relative_k_proj)|embed_audio.*(_projection|linear_\d)"
    r"|model\.(encoder|projector)\..*\.(to_q|to_kv|up_proj|query|out_mid)"
    r"|(?<!language_)(?<!language_model\.)model\.layers.*qkv_proj|audio_embed.*(q_proj|k_proj|gate_up_proj|for_speech|embed.out))"
)


def test_the_class_is_registered_and_matches_transformers_own(pair, both):
    theirs, ours = both
    assert type(ours).__name__ == f"Liger{type(theirs).__name__}"
    call = pair.scene(*DOCUMENTS)
    expected, found = theirs(**call, use_cache=False), ours(**call)
    for output in (expected, found):
        output.loss.backward()
    own = dict(ours.named_parameters())
    distances = {"loss": relative_distance(found.loss, expected.loss)}
    reached = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    # Routers have names of their own.
    assert {name for name in reached if ".router." not in name} <= set(ours.state_dict()) | set(own)
    gradients = {name: x for name, x in reached.items() if name in own}
    assert any(map(of_sounds, gradients))
    # Without positions a key's bias shifts all scores of a query equally: its gradient is rounding only.
    gradients = {
        name: x for name, x in gradients.items() if not of_sounds(name) or not name.endswith(OF_KEYS)
    }
    distances |= {
        name: relative_distance(own[name].grad, x.view_as(own[name])) for name, x in gradients.items()
    }
    kept = {name: x.clone() for name, x in gradients.items()}

    def again(seed: int) -> dict[str, float]:
        theirs.zero_grad()
        with OtherOrder(seed):
            theirs(**call, use_cache=False).loss.backward()
        trained = dict(theirs.named_parameters())
        return {name: relative_distance(trained[name].grad, x) for name, x in kept.items()}

    assert distances.pop("loss") <= BOUND
    assert not beyond_rounding(distances, again)


def test_saved_files_equal_transformers_own(both, tmp_path):
    _, ours = both
    ours.save_pretrained(tmp_path / "ours")
    names = [path.name for path in (tmp_path / "theirs").glob("*.safetensors")]
    assert names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("copies", [1, 2])
def test_generate_gives_transformers_own_tokens(copies, pair, both):
    """Also with several sequences per prompt, each with its own sounds."""
    theirs, ours = (model.eval() for model in both)
    call = pair.scene(*DOCUMENTS, padding="left")
    del call["labels"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 9, "eos_token_id": None}
    # No image token is generated: its meaning differs between versions.
    options["suppress_tokens"] = [*pair.ours.spec.placeholders.values()]
    expected = theirs.generate(**call, **options).repeat_interleave(copies, 0)
    options |= {"num_return_sequences": copies, "num_beams": copies} if copies > 1 else {}
    found = ours.generate(**call, **options)
    if copies == 1:
        assert torch.equal(found, expected)
    assert found.shape == expected.shape


def test_lora_trains_the_layers_of_the_encoder_as_in_transformers(pair, both):
    peft = pytest.importorskip("peft")
    targets = OF_A_CONFORMER if hasattr(pair.ours.audio.encoder, "subsampling") else TARGETS
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    call = pair.scene(*DOCUMENTS)
    torch.manual_seed(11)
    theirs, ours = (peft.get_peft_model(model, config) for model in both)
    values = {name: p.detach() for name, p in theirs.named_parameters() if "lora" in name}
    missing = ours.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys
    with clear_of_ties(BOUND):
        found = ours(**call)
    expected = theirs(**call, use_cache=False)
    for output in (expected, found):
        output.loss.backward()
    trained = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in (ours, theirs)]
    assert trained[0].keys() == trained[1].keys()
    own, gradients = ({n: p.grad for n, p in one.items() if p.grad is not None} for one in trained)
    assert own.keys() == gradients.keys()
    adapted = ("k_proj", "embed_audio", "to_kv")
    assert any(of_sounds(name) and any(part in name for part in adapted) for name in own)
    distances = {name: relative_distance(own[name], x) for name, x in gradients.items()}
    kept = {name: x.clone() for name, x in gradients.items()}

    def again(seed: int) -> dict[str, float]:
        theirs.zero_grad()
        with OtherOrder(seed):
            theirs(**call, use_cache=False).loss.backward()
        return {name: relative_distance(trained[1][name].grad, x) for name, x in kept.items()}

    assert relative_distance(found.loss, expected.loss) <= BOUND
    assert not beyond_rounding(distances, again)
