"""Our vision-language models in transformers match transformers' own in results, files and generation."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle

import pytest
import safetensors
import torch
from pairs import BOUND, Run, beyond_bound, relative_distance, spec_of
from scenes import DOCUMENTS, Image, Video, auto_class, rows_of_prompts

import liger_models
from liger_models.architectures import list_architectures
from liger_models.convert.errors import DataError
from liger_models.layers.specs import AltUpSpec
from liger_models.layers.vision.repeated import repeat_pictures

transformers = pytest.importorskip("transformers")

# No image token is generated: its meaning differs between versions.
EOS = {"do_sample": False, "pad_token_id": 9, "eos_token_id": None, "suppress_tokens": [3, 4]}


pytestmark = pytest.mark.usefixtures("hf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Function that returns the folder of a family's checkpoint, written by transformers' own model."""
    made = {}

    def get(pair):
        name = pair.architecture.model_type
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoints") / name
            pair.reference.save_pretrained(made[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def ours(pair, folders, models):
    """Our model of the pair, loaded by an Auto class; a test that changes it makes a copy."""
    name = pair.architecture.model_type
    if name not in models:
        models[name] = auto_class(name).from_pretrained(folders(pair))
    return models[name].train(pair.reference.training)


def by_checkpoint_names(model) -> dict[str, torch.Tensor]:
    """Gradients under the names of transformers' own modules."""
    own, found = dict(model.named_parameters()), {}
    for name, expr in model.weight_map(model.model.own_layout).items():
        if name in own and own[name].grad is not None:
            found |= expr.write(own[name].grad)
    return found


def run(model, **call) -> Run:
    model.zero_grad()
    output = model(**call, return_logits=True)
    output.loss.backward()
    return Run(output.loss, output.logits, by_checkpoint_names(model))


@pytest.mark.supports("vision-language models", "loss and gradients")
@pytest.mark.of_layers("tokens")
def test_logits_loss_and_every_gradient_match_the_reference(pair, ours):
    """The batch has images of several sizes, videos, padding, and another divisor of the loss."""
    assert type(ours).__name__ == f"Liger{pair.architecture.reference}"
    assert isinstance(ours, liger_models.hf.LigerForConditionalGeneration)
    call = pair.scene(*DOCUMENTS.values())
    expected = pair.run_reference(**call, num_items_in_batch=40)
    found = run(ours, **call, num_items_in_batch=torch.tensor(40))
    assert not beyond_bound(found.distances(expected, call["attention_mask"].bool()))


@pytest.mark.of_layers("tokens")
@pytest.mark.supports("vision-language models", "checkpoints byte for byte, to native models and back")
def test_files_equal_the_references_and_the_native_models(pair, ours, folders, tmp_path):
    ours.save_pretrained(tmp_path / "ours")
    name = "model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (folders(pair) / name).read_bytes()
    native = liger_models.from_hub(tmp_path / "ours")
    native.save_pretrained(tmp_path / "native")
    for file in (name, "config.json"):
        assert (tmp_path / "native" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
    again = auto_class(pair.architecture.model_type).from_pretrained(tmp_path / "native").eval()
    assert again.config.architectures == [pair.architecture.reference]
    batch, logits, _ = pair.probe
    with torch.no_grad():
        of_native, of_ours = native(**batch, return_logits=True).logits, again(**batch).logits
    for found in (of_native, of_ours):
        assert not beyond_bound({"logits": relative_distance(found, logits)})


@pytest.mark.of_layers("tokens")
@pytest.mark.supports("vision-language models", "generate")
def test_generated_tokens_equal_the_references(pair, ours):
    """Rows with images, videos or none."""
    call = rows_of_prompts(pair)
    del call["labels"]
    training = pair.reference.training
    expected = pair.reference.eval().generate(**call, max_new_tokens=6, **EOS)
    pair.reference.train(training)
    assert torch.equal(ours.eval().generate(**call, max_new_tokens=6, **EOS), expected)
    gc.collect()


@pytest.mark.of_layers
def test_modules_have_the_names_of_transformers_own(pair, ours):
    """Tools look up layers by name; packed projections are split."""
    split = copy.deepcopy(ours)
    split.split_projections()
    theirs = {name for name, m in pair.reference.named_modules() if isinstance(m, torch.nn.Linear)}
    found = {name for name, m in split.named_modules() if isinstance(m, torch.nn.Linear)}
    # Routers are parameters in our models, Llama 4's patch embedding has the form of the others', and Gemma
    # 4's clipped layers are inside other layers.
    known = (
        "router",
        ".gate",
        "vision_tower.patch_embed",
        "patch_embedding",
        "patch_embedder",
        "patch_projection",
        "patch_dense",
    )
    differ = {name.removesuffix(".linear") for name in theirs} ^ {
        name.removesuffix(".linear") for name in found
    }
    # Kimi K2.5's checkpoints pack what its encoder splits with another order of rows: it stays one layer.
    packed = tuple(name.removesuffix("qkv_proj") for name in found - theirs if name.endswith(".qkv_proj"))
    assert not packed or pair.architecture.model_type == "kimi_k25"
    # Transformers' modules of MiniMax-M3 pack what files hold apart.
    differ -= {name.replace("gate_up_proj", "up_proj") for name in theirs - found if "gate_up_proj" in name}
    assert not {
        name for name in differ if not any(part in name for part in known) and not name.startswith(packed)
    }


@pytest.mark.parametrize("family", ["llama4", "gemma3"])
def test_a_model_with_split_projections_loads_its_own_state(family, pair, ours, folders):
    """This also holds if transformers' own model has the decoder's modules at the top level."""
    model = copy.deepcopy(ours)
    model.split_projections()
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    given = {name for name, _ in model.checkpoint_tensors()}
    assert given == set(safetensors.safe_open(folders(pair) / "model.safetensors", "pt").keys())


@pytest.mark.of_layers("tokens")
def test_hidden_states_match_the_reference(pair, ours):
    if not hasattr(pair.reference, "model"):
        pytest.skip("the reference returns the hidden states of its language model only")
    call = pair.batch()
    del call["labels"]
    with torch.no_grad():
        models = (pair.reference, ours)
        expected, found = (m.model(**call, output_hidden_states=True).hidden_states for m in models)
    if isinstance(
        pair.ours.spec.streams, AltUpSpec
    ):  # the reference has the streams of all in the first axis
        found, expected = (x.movedim(2, 0) for x in found[:-1]), expected[:-1]  # and does not join them
    both = zip(found, expected, strict=True)  # Qwen4's reference has the streams of a token in one axis
    distances = {f"{i}": relative_distance(one.view_as(other), other) for i, (one, other) in enumerate(both)}
    assert not beyond_bound(distances)


PARTS = ("vision", "projector", "language")


@pytest.mark.of_layers("tokens")
def test_trainable_parts_match_the_native_model(pair, ours):
    """A part may be given by any module of transformers' own model that holds its layers."""
    native, layout = copy.deepcopy(pair.ours), ours.model.own_layout
    for frozen in (*itertools.combinations(PARTS, 1), *itertools.combinations(PARTS, 2), ()):
        found = []
        for model in (ours, native):
            model.freeze(*frozen)
            own = dict(model.named_parameters())
            of_tensors = {n: e for n, e in model.weight_map(layout).items() if n in own}
            found.append({r.name: own[n].requires_grad for n, e in of_tensors.items() for r in e.refs()})
        assert {name: found[0][name] for name in found[1]} == found[1], frozen
    ours.freeze()


@pytest.mark.parametrize("family", ["gemma3", "llava", "llava_onevision", "nemotron_h_omni"])
def test_unused_parameters_need_no_gradient(family, pair, folders):
    """DDP would wait for such gradients; choosing the parts to train does not enable them either."""
    model = auto_class(family).from_pretrained(folders(pair))
    assert model.base_decoder.unread
    for parts in ((), ("language",), ("vision", "projector")):
        if parts:
            model.freeze(*parts)
        model.zero_grad()
        model(**pair.scene(*DOCUMENTS.values())).loss.backward()
        assert {p.requires_grad for p in model.parameters()} == {True, False}
        reached = {n: p for n, p in model.named_parameters() if "audio" not in n}  # the call has no sounds
        assert not [n for n, p in reached.items() if p.requires_grad != (p.grad is not None)]


@pytest.mark.of_layers("tokens")
def test_a_keyword_unknown_to_the_family_is_refused_by_name(pair, ours):
    call = pair.scene([1, Image(4, 4), 2])
    unknown = next(
        name for name in ("aspect_ratio_ids", "video_position_ids") if name not in call and "grid" not in name
    )
    if unknown == "video_position_ids" and "image_position_ids" in call:
        unknown = "video_grid_thw"
    with pytest.raises((TypeError, liger_models.DataError), match=unknown):
        ours(**call, **{unknown: torch.ones(1, 2).long()})


FEW = pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])


@FEW
def test_checkpointing_works_with_frozen_parts_and_copies(family, pair, ours):
    call = pair.scene(*DOCUMENTS.values())
    expected = run(ours, **call)
    model = copy.deepcopy(ours).train()
    model.gradient_checkpointing_enable()
    assert {layer.activation_memory for layer in model.model.vision.encoder.layers} == {"checkpoint"}
    assert not beyond_bound(run(model, **call).distances(expected))
    model.gradient_checkpointing_disable()
    assert {layer.activation_memory for layer in model.model.vision.encoder.layers} == {"lean"}
    model.freeze("vision", "language")
    model.zero_grad()
    trained = run(model, **call).gradients
    assert trained
    assert all("merger" in name or "projector" in name for name in trained), trained.keys()
    half = copy.deepcopy(ours).bfloat16()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(**call).loss.dtype == torch.float32


@FEW
def test_fresh_weights_base_models_pickles_and_offloaded_layers_work(
    family, pair, ours, folders, hf, tmp_path
):
    fresh = transformers.AutoModelForImageTextToText.from_config(ours.config)
    assert all(p.isfinite().all() for p in fresh.parameters())
    call = pair.scene(*DOCUMENTS.values())
    del call["labels"]
    devices = {name.rpartition(".")[0]: "cpu" for name, _ in ours.named_parameters()} | {"lm_head": "cpu"}
    devices |= {name: "disk" for name in devices if "layers.1" in name or "blocks.1" in name}
    on_disk = transformers.AutoModelForImageTextToText.from_pretrained(
        folders(pair), device_map=devices, offload_folder=tmp_path / "offloaded"
    )
    with torch.no_grad():
        expected = ours.eval()(**call).logits
        for model in (pickle.loads(pickle.dumps(ours)), on_disk.eval()):
            # Not bit for bit: copies of tensors of a mapped file are aligned differently.
            assert relative_distance(model(**call).logits, expected) <= BOUND
    base = transformers.AutoModel.from_pretrained(folders(pair)).eval()
    with torch.no_grad():
        hidden = (model(**call).last_hidden_state for model in (base, ours.model))
        assert relative_distance(*hidden) <= BOUND
    base.save_pretrained(tmp_path / "base")
    hf.unregister()
    _, told = transformers.AutoModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


FORMS = ["qwen2_5_vl", "mistral3", "llava", "gemma4", "lfm2_vl", "llava_onevision", "idefics3", "mllama"]


@pytest.mark.parametrize("family", FORMS)
def test_rows_are_repeated_with_their_pictures(family, pair, ours):
    """One family for each form of a processor's outputs."""
    call = pair.rows_of_one_length(
        [[1, Image(4, 4), 2, Video(2, 4, 4, 1.0), 1], [2, Image(4, 4), 1, Image(6, 4), 2], [9]]
    )
    del call["labels"]
    ids, more = ours.eval()._expand_inputs_for_generation(2, **call)
    with torch.no_grad():
        expected = ours(**call).logits.repeat_interleave(2, 0)
        assert relative_distance(ours(ids, **more).logits, expected) <= BOUND


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "mllama"])
def test_beams_equal_the_references(family, pair, ours):
    call = pair.scene([2, Image(4, 4), 5])
    del call["labels"]
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2, **EOS}
    expected = pair.reference.eval().generate(**call, **options)
    assert torch.equal(ours.eval().generate(**call, **options), expected)


def test_pictures_that_are_not_the_rows_own_are_refused():
    spec = spec_of("qwen2_vl").vision
    ids, grids = torch.tensor([[5, 3, 3, 6], [3, 3, 3, 3]]), torch.tensor([[1, 2, 4], [1, 4, 4]])
    given = {"image_grid_thw": grids, "pixel_values": torch.randn(24, spec.patches.width)}
    assert repeat_pictures(spec, given, ids, 2)["image_grid_thw"].tolist() == grids[[0, 0, 1, 1]].tolist()
    with pytest.raises(DataError, match="of row 0 are not whole pictures"):
        repeat_pictures(spec, given, ids.flip(0), 2)
    with pytest.raises(DataError, match="tokens of 1 pictures or sounds, and 2 are"):
        repeat_pictures(spec, given, ids[:1], 2)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "mllama"])
def test_resized_vocabularies_match_the_reference(family, pair, ours):
    call = pair.scene(*DOCUMENTS.values())
    theirs, model = copy.deepcopy(pair.reference), copy.deepcopy(ours)
    for each in (theirs, model):
        torch.manual_seed(0)
        each.resize_token_embeddings(140, mean_resizing=False)
    with torch.no_grad():
        expected, found = theirs(**call, use_cache=False), model(**call, return_logits=True)
    assert found.logits.shape[-1] == 140
    assert not beyond_bound({"loss": relative_distance(found.loss, expected.loss)})
    assert model.get_input_embeddings().num_embeddings == 140


def test_all_vision_language_families_are_registered(hf):
    for name in list_architectures(vision=True):
        found = hf.classes_of(name).causal_lm
        assert issubclass(found, hf.LigerForConditionalGeneration)
        assert getattr(transformers, found.architecture.reference) is found
    hf.unregister()
    config = transformers.AutoConfig.for_model("gemma3")
    model = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    assert model.__module__.startswith("transformers.")
