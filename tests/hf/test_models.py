"""Our transformers models match the results of transformers' own, and the interface libraries expect."""

from __future__ import annotations

import copy
import json
import types

import pytest
import torch
import torch.nn.functional as F
from hf_pairs import BOUND, gradients, relative_distance

import liger_models
from liger_models import Distillation, ScoreOptions
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "gemma2", "qwen3_moe", "gemma4_text", "gpt_neox", "stablelm"]


def test_families_that_transformers_lacks_are_refused_by_name(monkeypatch):
    from liger_models.hf import families

    monkeypatch.setattr(families, "CONFIG_MAPPING", {})
    with pytest.raises(liger_models.UnsupportedModelError, match=r"does not have 'olmo'.*from_hub"):
        families.classes_of.__wrapped__("olmo")


def test_every_listed_name_can_be_imported():
    import liger_models.hf

    assert {name for name in liger_models.hf.__all__ if not hasattr(liger_models.hf, name)} == set()


def test_the_auto_classes_give_our_models_once_registered(make_both, hf):
    both = make_both("llama")
    assert type(both.ours).__name__ == "LigerLlamaForCausalLM"
    assert isinstance(both.ours, transformers.PreTrainedModel)
    hf.unregister()
    again = transformers.AutoModelForCausalLM.from_pretrained(both.folder)
    assert type(again) is type(both.reference)


def test_a_class_that_several_families_share_keeps_the_name_of_its_own(hf):
    hf.register()
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**find_architecture("internlm3").tiny)
    )
    assert type(model) is hf.classes_of("internlm3").causal_lm
    assert type(model).__name__ == "LigerInternLM3ForCausalLM"
    assert transformers.LlamaForCausalLM is hf.classes_of("llama").causal_lm


def test_a_class_that_several_families_share_loads_each_as_its_own(make_both, hf):
    """Configs name LLaMA's class, whose keys and tensors may have other names than this family's."""
    both = make_both("internlm3")
    config = json.loads((both.folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (both.folder / "config.json").write_text(json.dumps(config))
    found = transformers.LlamaForCausalLM.from_pretrained(both.folder)
    assert type(found) is type(both.ours)
    given = transformers.LlamaForCausalLM.from_pretrained(both.folder, config=both.ours.config)
    assert type(given) is type(both.ours)
    base = hf.classes_of("llama").base.from_pretrained(both.folder)
    assert type(base) is hf.classes_of("internlm3").base


def test_a_name_in_transformers_gives_our_model_while_it_is_registered(make_both, hf):
    both = make_both("llama")
    assert both.ours.config.architectures == ["LlamaForCausalLM"]  # the key under which libraries look it up
    assert transformers.LlamaForCausalLM is type(both.ours)
    hf.unregister()
    assert transformers.LlamaForCausalLM is type(both.reference)


MODES = {
    "loss": lambda labels, teacher: {"labels": labels},
    "shifted": lambda labels, teacher: {"shift_labels": labels},
    "divided": lambda labels, teacher: {"labels": labels, "num_items_in_batch": 7},
    "scores": lambda labels, teacher: {"labels": labels, "score": ScoreOptions(0.7, entropy=True)},
    "lesson": lambda labels, teacher: {"labels": labels, "distill": Distillation(teacher, beta=0.3)},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_kind_of_call_gives_the_bits_of_the_native_model(family, mode, make_both, batch):
    both = make_both(family)
    native = liger_models.from_hub(both.folder, device="cpu", dtype=torch.float32)
    call = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    call |= mode(batch["labels"], native)
    found, expected = both.ours(**call), native(**call)
    names = expected.keys() - {"logits"}
    assert names
    assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.supports("transformers", "loss and gradients")
@pytest.mark.parametrize("projections", ["fused", "split"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_logits_loss_and_gradients_equal_the_reference(family, projections, make_both, batch):
    both = make_both(family, projections=projections)
    expected, found = both.reference(**batch), both.ours(**batch)
    expected.loss.backward()
    found.loss.backward()
    valid = batch["attention_mask"].bool()
    distances = {
        "loss": relative_distance(found.loss, expected.loss),
        "logits": relative_distance(found.logits[valid], expected.logits[valid]),
    }
    truth, ours = gradients(both.reference), gradients(both.ours)
    assert truth.keys() == ours.keys()
    distances |= {name: relative_distance(ours[name], truth[name]) for name in truth}
    assert not {name: d for name, d in distances.items() if not d <= BOUND}


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_parameters_that_no_loss_reaches_need_no_gradient(family, make_both, batch):
    """DDP would wait for the gradients of indexers, and average none in the first step without an error. In
    DeepSeek-V4 they are moved to other modules. Choosing what to train does not enable them either.
    """
    model = make_both(family).ours.train()
    for choose in (lambda: None, model.freeze):
        choose()
        model.zero_grad()
        model(**batch).loss.backward()
        assert {p.requires_grad for p in model.parameters()} == {True, False}
        assert not [n for n, p in model.named_parameters() if p.requires_grad != (p.grad is not None)]


@pytest.mark.supports("transformers", "label counts")
@pytest.mark.parametrize("how", ["labels", "shift_labels"])
def test_the_loss_is_divided_by_the_given_count(how, make_both, batch):
    both = make_both("llama")
    if how == "shift_labels":
        batch["shift_labels"] = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    labels = {"labels": batch["input_ids"]} if how == "shift_labels" else {}  # the reference needs both
    expected = both.reference(**batch, **labels, num_items_in_batch=40)
    for given in ({}, labels):  # labels are ignored if shift_labels are given
        found = both.ours(**batch, **given, num_items_in_batch=torch.tensor(40))
        assert relative_distance(found.loss, expected.loss) <= BOUND


def test_logits_come_with_a_loss_in_evaluation_and_not_in_training(make_both, batch):
    model = make_both("llama").ours
    assert model(**batch).logits is not None
    assert model(**batch, skip_logits=True).logits is None
    model.train()
    assert model(**batch).logits is None
    assert model(**batch, return_logits=True).logits is not None


def test_logits_of_some_positions_match_the_reference(make_both, batch):
    both = make_both("gemma2")
    del batch["labels"]
    for kept in (1, 3, torch.tensor([2, 5])):
        expected, found = (m(**batch, logits_to_keep=kept).logits for m in (both.reference, both.ours))
        assert relative_distance(found[1], expected[1]) <= BOUND  # the row without padding


KEPT = {"last": 6, "mask": torch.arange(13) % 4 > 0, "numbers": torch.tensor([0, 3, 4, 5, 11])}


@pytest.mark.supports("transformers", "loss and gradients")
@pytest.mark.parametrize("kept", KEPT)
def test_labels_may_cover_only_the_kept_positions(kept, make_both, batch):
    """ms-swift trains on the logits that predict the answer, with only the labels of the answer."""
    both = make_both("gemma2")
    ids, kept = batch["input_ids"], KEPT[kept]
    labels = (ids[:, -kept:] if isinstance(kept, int) else ids[:, kept]).clone()
    labels[1, 2] = -100
    results = []
    for model in (both.reference, both.ours):
        loss = model(ids, labels=labels, logits_to_keep=kept).loss
        loss.backward()
        results.append((loss, gradients(model)))
    (expected, truth), (found, ours) = results
    assert relative_distance(found, expected) <= BOUND
    assert truth.keys() == ours.keys()
    assert max(relative_distance(ours[name], truth[name]) for name in truth) <= BOUND
    with pytest.raises(liger_models.DataError, match="labels must be integers"):
        both.ours(ids, labels=labels[:, 1:], logits_to_keep=kept)


# Without granitemoe: transformers' own fails on the request, up to 5.17.
ROUTED = ["ernie4_5_moe", "gpt_oss", "mixtral", "minimax_m2", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"]


@pytest.mark.supports("transformers", "router logits and their loss")
@pytest.mark.parametrize("family", ROUTED)
def test_the_router_loss_matches_the_reference_and_follows_the_config(family, make_both, batch):
    """TRL's trainers switch it in their constructor, on the config of an existing model."""
    both = make_both(family)
    for model in (both.reference, both.ours):
        model.config.output_router_logits = True
    both.reference.router_aux_loss_coef = both.ours.config.router_aux_loss_coef = 0.5
    expected, found = both.reference(**batch), both.ours(**batch)
    assert relative_distance(found.aux_loss, expected.aux_loss) <= BOUND
    assert relative_distance(found.loss, expected.loss) <= BOUND
    valid = batch["attention_mask"].bool().flatten()
    for ours, theirs in zip(found.router_logits, expected.router_logits, strict=True):
        assert relative_distance(ours[valid], theirs.flatten(0, -2)[valid]) <= BOUND
    found.loss.backward()
    expected.loss.backward()
    truth, ours = gradients(both.reference), gradients(both.ours)
    routers = [name for name in truth if "gate.weight" in name or "router" in name]
    assert routers
    assert max(relative_distance(ours[name], truth[name]) for name in routers) <= BOUND
    both.ours.config.output_router_logits = False
    assert both.ours(**batch).loss < found.loss
    assert both.ours(**batch, output_router_logits=True).loss == found.loss


def test_router_logits_of_a_dense_model_are_refused(make_both, batch):
    with pytest.raises(ValueError, match="no layer of this model has experts"):
        make_both("llama").ours(**batch, output_router_logits=True)


@pytest.mark.supports("transformers", "hidden states")
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_match_the_reference(family, make_both, batch):
    both = make_both(family)
    expected, found = (
        m(**batch, output_hidden_states=True).hidden_states for m in (both.reference, both.ours)
    )
    assert len(found) == len(expected)
    valid = batch["attention_mask"].bool()
    assert max(relative_distance(f[valid], e[valid]) for f, e in zip(found, expected, strict=True)) <= BOUND


@pytest.mark.parametrize("level", ["lean", "checkpoint"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_hidden_state_gets_its_gradient(family, level, make_both, batch):
    both, results = make_both(family), []
    both.ours.set_activation_memory(level)
    for model in (both.reference, both.ours):
        output = model(**batch, output_hidden_states=True, use_cache=False)
        for hidden in output.hidden_states:
            hidden.retain_grad()
        output.loss.backward()
        results.append([hidden.grad for hidden in output.hidden_states])
    assert all(grad is not None for grads in results for grad in grads)
    valid = batch["attention_mask"].bool()
    assert max(relative_distance(f[valid], e[valid]) for e, f in zip(*results, strict=True)) <= BOUND


def test_unsupported_arguments_are_refused(make_both, batch):
    model = make_both("llama").ours
    with pytest.raises(ValueError, match="attention weights are never computed"):
        model(**batch, output_attentions=True)
    with pytest.raises(TypeError, match="colour"):
        model(**batch, colour="red")
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    with pytest.raises(ValueError, match="position_ids or cu_seq_lens_q"):
        model(batch["input_ids"], attention_mask=mask)
    with pytest.raises(liger_models.DataError, match="outside the vocabulary"):
        model(torch.tensor([[5, 131]]))


@pytest.mark.supports("transformers", "packing")
def test_packed_documents_stay_separate(make_both, batch):
    model = make_both("gemma2").ours
    first, second = batch["input_ids"][0, :9], batch["input_ids"][1]
    apart = [model(x[None]).logits[0] for x in (first, second)]
    ids = torch.cat([first, second])[None]
    positions = torch.cat([torch.arange(9), torch.arange(13)])[None]
    bounds = torch.tensor([0, 9, 22], dtype=torch.int32)
    flattened = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 13, "max_length_k": 13}
    flattened["seq_idx"] = torch.tensor([[0] * 9 + [1] * 13])
    for found in (
        model(ids, position_ids=positions, use_cache=False),
        model(ids, position_ids=positions, use_cache=False, **flattened),
    ):
        assert relative_distance(found.logits[0], torch.cat(apart)) <= BOUND
    with pytest.raises(TypeError, match="seq_idx"):  # on its own it would be ignored
        model(ids, seq_idx=flattened["seq_idx"])


def test_a_tuple_is_returned_on_request(make_both, batch):
    both = make_both("llama")
    theirs, ours = (m(**batch, return_dict=False) for m in (both.reference, both.ours))
    assert [type(x) for x in ours] == [type(x) for x in theirs]
    assert ours[0].shape == ()
    assert ours[1].shape == (2, 13, 131)


@pytest.mark.supports("transformers", "gradient checkpointing")
@pytest.mark.parametrize("level", ["checkpoint", "mlp", "all"])
def test_activation_memory_changes_no_gradient(level, make_both, batch):
    model = make_both("qwen3_moe").ours.train()
    model(**batch).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    if level == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.is_gradient_checkpointing
        assert model.is_activation_checkpointing
        assert model.model.is_activation_checkpointing
    else:
        model.set_activation_memory(level)
    model(**batch).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=0, msg=name)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert not model.is_activation_checkpointing


def test_disabling_checkpointing_removes_the_hooks_of_input_gradients(make_both, batch):
    """If transformers loaded adapters, enabling checkpointing registers such hooks each time."""
    model = make_both("llama").ours
    model._hf_peft_config_loaded = True
    model.activation_checkpointing_enable()
    model.gradient_checkpointing_enable()
    assert model.get_input_embeddings().requires_grad_(False)(batch["input_ids"]).requires_grad
    model.activation_checkpointing_disable()
    assert not model.get_input_embeddings()(batch["input_ids"]).requires_grad


@pytest.mark.supports("transformers", "NEFTune")
def test_noise_on_embeddings_gets_batched_embeddings(make_both, batch):
    """NEFTune reads the second and third dimension of the embedding's output."""
    both = make_both("llama")
    for model in (both.reference, both.ours):
        model.get_input_embeddings().register_forward_hook(lambda m, args, x: x + 0.1 * x.size(1) * x.size(2))
    assert relative_distance(both.ours(**batch).loss, both.reference(**batch).loss) <= BOUND


@pytest.mark.supports("transformers", "embeddings instead of ids")
def test_embeddings_may_replace_ids(make_both, batch):
    both = make_both("gemma2")
    embeds = torch.randn(2, 13, both.ours.config.hidden_size)
    expected, found = (m(inputs_embeds=embeds).logits for m in (both.reference, both.ours))
    assert relative_distance(found, expected) <= BOUND


@pytest.mark.supports("transformers", "resized vocabularies")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [140, 120])
def test_resized_vocabularies_match_the_reference(size, tied, make_both, batch):
    both = make_both("gemma2", tie_word_embeddings=tied)
    batch = {name: x.where(x < 120, x - 20) for name, x in batch.items()}
    for model in (both.reference, both.ours):
        torch.manual_seed(0)
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():  # new rows are random in each model
            model.get_input_embeddings().weight[120:] = 0.1
            model.get_output_embeddings().weight[120:] = 0.1
    assert relative_distance(both.ours(**batch).loss, both.reference(**batch).loss) <= BOUND
    assert both.ours(**batch).logits.shape[-1] == size
    assert (both.ours.lm_head.weight is both.ours.model.embed_tokens.weight) == tied
    with pytest.raises(liger_models.DataError, match="outside the vocabulary"):
        both.ours(torch.tensor([[size]]))
    both.ours.save_pretrained(both.folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(both.folder)
    assert torch.equal(again(**batch).loss, both.ours(**batch).loss)


def test_a_resized_head_and_embedding_are_not_initialised_again(make_both):
    model = make_both("llama", tie_word_embeddings=False).ours
    model.resize_token_embeddings(140)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.post_init()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("projections", ["fused", "split"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_models_state_dict_initialises_another_model(family, projections, make_both):
    """Experts of gpt-oss have the same names in checkpoints, but are transposed there."""
    model = make_both(family, projections=projections).ours
    expected = model.state_dict()
    again = type(model).from_pretrained(None, config=model.config, state_dict=expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    stored = dict(model.checkpoint_tensors())
    again = type(model).from_pretrained(None, config=model.config, state_dict=stored)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_plain_layers_set_as_embedding_and_head_keep_the_familys_scale_and_cap(make_both, batch):
    model = make_both("gemma2").ours  # scales its embeddings and caps its logits
    expected = model(**batch)
    embedding, head = torch.nn.Embedding(131, 48), torch.nn.Linear(48, 131, bias=False)
    embedding.weight, head.weight = model.model.embed_tokens.weight, model.lm_head.weight
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    assert torch.equal(model(**batch).logits, expected.logits)
    assert torch.equal(model.train()(**batch).loss, expected.loss)


def test_models_can_be_copied_and_cast(make_both, batch):
    model = make_both("llama", projections="split").ours
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert model(**batch).loss != twin(**batch).loss
    assert twin.model.layers[0].self_attn.q_proj.weight.any()
    assert twin.to(torch.bfloat16)(**batch).logits.dtype == torch.bfloat16
    assert twin.half()(**batch).loss.isfinite()


def test_projections_can_be_split_and_fused_at_any_time(make_both, batch):
    both = make_both("llama")
    both.ours.split_projections()
    assert {"q_proj", "k_proj", "v_proj"} <= dict(both.ours.model.layers[0].self_attn.named_children()).keys()
    split = both.ours(**batch).loss
    both.ours.save_pretrained(both.folder)
    both.ours.fuse_projections()
    assert relative_distance(both.ours(**batch).loss, split) <= BOUND
    hidden = both.reference.state_dict()
    saved = type(both.reference).from_pretrained(both.folder).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in hidden.items())


def test_patches_of_liger_kernel_are_refused(make_both):
    def lce_forward(self):
        pass

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    model = make_both("llama").ours
    with pytest.raises(TypeError, match="leave the option out"):
        model.forward = types.MethodType(lce_forward, model)
    norm = model.model.norm  # as in TRL, which keeps the model's own forward
    norm.__dict__["forward"] = types.MethodType(lce_forward, norm)
    with pytest.raises(TypeError, match="leave the option out"):
        model.train()


@pytest.mark.supports("transformers", "classifiers")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_classifiers_and_rewards_equal_the_reference(family, make_both, batch, hf):
    both = make_both(family, "SequenceClassification", num_labels=3, pad_token_id=0)
    ids = batch["input_ids"] * batch["attention_mask"]
    labels = torch.tensor([2, 0])
    expected, found = (
        m(ids, attention_mask=batch["attention_mask"], labels=labels) for m in (both.reference, both.ours)
    )
    assert relative_distance(found.logits, expected.logits) <= BOUND
    assert relative_distance(found.loss, expected.loss) <= BOUND
    both.ours.save_pretrained(both.folder / "again")
    mixed = (
        type(both.reference).from_pretrained(both.folder / "again").eval()
    )  # its base model comes from AutoModel
    assert type(mixed.model) is type(both.ours.model)
    assert torch.equal(mixed(ids, attention_mask=batch["attention_mask"]).logits, found.logits)
    hf.unregister()
    mixed.save_pretrained(both.folder / "again")
    again = type(both.reference).from_pretrained(both.folder / "again")
    assert all(torch.equal(again.state_dict()[n], x) for n, x in both.reference.state_dict().items())


def test_an_embedding_cannot_outgrow_the_per_layer_inputs(make_both):
    ours = make_both("gemma4_text").ours
    assert ours.resize_token_embeddings(120).num_embeddings == 120
    with pytest.raises(ValueError, match=r"inputs of their own for 137 ids.*found 140"):
        ours.resize_token_embeddings(140)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma3_text", {"use_bidirectional_attention": True}), ("qwen3", {"is_causal": False})],
)
def test_bidirectional_base_models_match_the_reference(family, changes, make_both, batch):
    both = make_both(family, task="", **changes)
    call = {name: batch[name] for name in ("input_ids", "attention_mask")}
    seen = call["attention_mask"].bool()
    ours, theirs = both.ours(**call), both.reference(**call)
    assert ours.past_key_values is None
    distance = relative_distance(ours.last_hidden_state[seen], theirs.last_hidden_state[seen])
    assert distance <= BOUND
    with pytest.raises(DataError, match="attention is bidirectional"):
        both.ours(**call, use_cache=True)
