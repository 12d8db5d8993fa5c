"""The config.json of well-known models is read completely, and gives the published number of parameters.

`published/NAME.json` holds {"parameters": ..., "config": {...}}: facts of the model's repository. "source" is
the copy of its config.json with which the file was compared (repository, path and commit, if known), followed
by a colon and the parts compared, if not all. Keys missing in the copy, and files without a source, are from
memory. "computed" marks a count that is stated on no known page and was computed from the sizes; "note" lists
other differences. `dropout` lists the keys that ask for dropout, which `dropout=0.0` overrides. `misread`
says what the reference reads otherwise than the model was trained, and names the test of it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import reference_class
from variants import as_transformers_4, skipped

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.cards.published import layers_of_every_kind, with_layers
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.models.verification import config_class

PUBLISHED = {path.stem: path for path in sorted((Path(__file__).parent / "published").glob("*.json"))}


@pytest.fixture(params=PUBLISHED)
def published(request):
    return json.loads(PUBLISHED[request.param].read_text())


def test_a_published_config_has_the_published_parameters(published):
    """Layers that are the same are made once, unless they need others."""
    config = published["config"]
    spec = spec_of(config, dropout=0.0)
    kinds = Counter(spec.blocks)
    if spec.vision or spec.per_layer_vocab_size or any(needs_others(block) for block in kinds):
        model = liger_models.from_config(config, device="meta", dropout=0.0)
        assert model.num_parameters() == published["parameters"]
        return
    with torch.device("meta"):
        model = CausalLM(replace(spec, blocks=tuple(kinds)))
    sizes = (sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    further = sum((count - 1) * size for count, size in zip(kinds.values(), sizes, strict=True))
    assert model.num_parameters() + further == published["parameters"]


def spec_of(config, **options):
    return find_architecture(config["model_type"]).spec(HFConfig.load(config, **options))


def needs_others(block):
    keys = any(getattr(mixer, "keys_of", None) is not None for mixer in block.mixers)
    return keys or block.shared is not None


def test_a_published_config_is_read_as_its_reference_reads_it(published):
    """The reference's own version of the config, in its spelling, gives the same model."""
    if "misread" in published:
        return
    config = {**published["config"], **dict.fromkeys(published.get("dropout", ()), 0)}
    architecture = find_architecture(config["model_type"])
    reference_class(architecture)  # or skip
    reference = config_class(architecture)
    rewritten = reference(**json.loads(json.dumps(config))).to_dict()
    spec = architecture.spec(HFConfig.load(config))
    assert architecture.spec(HFConfig.load(rewritten)) == spec
    assert architecture.spec(HFConfig.load(as_transformers_4(rewritten, architecture.rope_keys))) == spec


def test_a_published_config_cut_to_a_layer_of_every_kind_has_the_first_layers(published):
    """GPU tests and the cards' training steps run such models; encoders are cut by the tests themselves."""
    if {"vision_config", "audio_config"} & published["config"].keys() or "scale_depth" in published["config"]:
        return  # MiniCPM scales its branches by the number of layers
    config = {**published["config"], **dict.fromkeys(published.get("dropout", ()), 0)}
    layers = layers_of_every_kind(config)
    whole, cut = (
        find_architecture(config["model_type"]).spec(HFConfig.load(c)).blocks
        for c in (config, with_layers(config, layers))
    )
    assert cut == whole[:layers]


def test_the_dropout_of_a_published_config_acts_or_is_refused(published):
    keys, said = published.get("dropout", ()), ""
    try:
        assert spec_of(published["config"]).has_dropout == bool(keys)
    except ConfigError as error:
        said = str(error)
    assert "dropout" in said or not said
    assert all(f"{key}: " in said for key in keys) or not said
    assert not spec_of(published["config"], dropout=0.0).has_dropout


def test_every_family_has_a_published_config():
    families = {*list_architectures(), *list_architectures(vision=True, audio=True)}
    found = {json.loads(path.read_text())["config"]["model_type"] for path in PUBLISHED.values()}
    without = {family for family in families if skipped(family, "published", "config")}
    assert families - found == without


def test_kimi_k2_is_found_by_its_own_name_too():
    config = json.loads(PUBLISHED["Kimi-K2-Instruct"].read_text())["config"]
    own = find_architecture("kimi_k2")
    assert own is find_architecture("deepseek_v3")
    assert own.spec(HFConfig.load({**config, "model_type": "kimi_k2"})) == own.spec(HFConfig.load(config))
