"""Training tools that load through transformers' Auto classes can load our models through their own hooks."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture
def load(make_both, hf):
    """Function that loads a checkpoint with the Auto class, for use after a tool's hook has run."""
    both = make_both("llama")
    hf.unregister()

    def of_class():
        return transformers.AutoModelForCausalLM.from_pretrained(both.folder)

    assert isinstance(of_class(), type(both.reference))
    return of_class


def test_a_tools_own_checkpointing_function_selects_our_checkpoint_level(load, hf):
    """LLaMA-Factory sets one on each model that it loads."""
    hf.register()
    model = load()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=lambda *args: None)
    assert set(model.activation_memory) == {"checkpoint"}
    model._set_gradient_checkpointing(enable=False)
    assert set(model.activation_memory) == {"lean"}


@pytest.mark.supports("Axolotl, LLaMA-Factory, ms-swift, oumi", "Axolotl's plugin")
@pytest.mark.parametrize(("adapter", "names"), [(None, "qkv_proj"), ("lora", "q_proj")])
def test_a_plugin_switches_axolotl_to_our_models(adapter, names, load, hf):
    base = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")
    manager = base.PluginManager.get_instance()
    name = "liger_models.hf.axolotl.LigerModelsPlugin"
    try:
        manager.register(name)
        manager.pre_model_load({"adapter": adapter})
    finally:
        plugin = manager.plugins.pop(name, None)
    assert isinstance(plugin, base.BasePlugin)
    model = load()
    assert isinstance(model, hf.LigerForCausalLM)
    assert hasattr(model.model.layers[0].self_attn.get_submodule(names), "weight")


@pytest.mark.supports("Axolotl, LLaMA-Factory, ms-swift, oumi", "oumi's import file")
def test_a_file_that_oumi_imports_switches_it_to_our_models(load, hf, tmp_path, monkeypatch):
    registry = pytest.importorskip("oumi.core.registry.registry", reason="oumi is not installed")
    switch = tmp_path / "switch_to_liger_models.py"
    switch.write_text("import liger_models.hf\nliger_models.hf.register()\n")
    (tmp_path / "files.txt").write_text(f"{switch}\n")
    monkeypatch.syspath_prepend(tmp_path)  # also removes the path that oumi adds
    registry._load_user_requirements(str(tmp_path / "files.txt"))
    assert isinstance(load(), hf.LigerForCausalLM)
