"""The installed transformers has all undocumented names that our integration uses.

A release that changes one fails here, with its name. A user's `import liger_models.hf` never fails; using it
then raises an error that names the missing part.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import liger_models

transformers = pytest.importorskip("transformers")

HERE = Path(liger_models.__file__).parent / "hf"

# By module: names that our classes override, call or set, and the parameters that they rely on.
USED = {
    "modeling_utils": {
        "PreTrainedModel.post_init": (),
        "PreTrainedModel._init_weights": ("module",),
        "PreTrainedModel._load_pretrained_model": ("model", "state_dict"),
        "PreTrainedModel._tied_weights_keys": (),
        "PreTrainedModel._no_split_modules": (),
        "PreTrainedModel._skip_keys_device_placement": (),
        "PreTrainedModel.base_model": (),
        "PreTrainedModel.enable_input_require_grads": (),
        "PreTrainedModel.gradient_checkpointing_enable": ("gradient_checkpointing_kwargs",),
        "PreTrainedModel.gradient_checkpointing_disable": (),
        "PreTrainedModel.is_gradient_checkpointing": (),
        "PreTrainedModel.save_pretrained": ("save_directory", "is_main_process", "push_to_hub"),
        "PreTrainedModel.set_input_embeddings": ("value",),
        "PreTrainedModel.set_output_embeddings": ("new_embeddings",),
        "PreTrainedModel.get_output_embeddings": (),
    },
    "core_model_loading": {
        "WeightConverter.__init__": ("source_patterns", "target_patterns", "operations"),
        "WeightConverter.rename_source_key": ("source_key",),
        "WeightConverter.reverse_transform": (),
        "ConversionOps.convert": ("input_dict",),
        "ConversionOps.reverse_op": (),
        "revert_weight_conversion": ("model", "state_dict"),
    },
    "conversion_mapping": {"register_checkpoint_conversion_mapping": ("mapping", "overwrite")},
    "generation.utils": {"GenerationMixin._get_candidate_generator": ()},
    "generation.candidate_generator": {"CandidateGenerator.get_candidates": ("input_ids",)},
    "cache_utils": {
        "Cache.update": ("key_states", "value_states", "layer_idx"),
        "Cache.get_seq_length": (),
        "Cache.get_mask_sizes": ("layer_idx",),
    },
    "trainer_callback": {
        "TrainerCallback.on_train_begin": ("args", "state", "control"),
        "TrainerCallback.on_optimizer_step": ("args", "state", "control"),
    },
    "models.auto.auto_factory": {"_LazyAutoMapping.__getitem__": ("key",)},
}


def imported():
    """Collect the names imported from transformers, by its modules."""
    for path in sorted(HERE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                yield node.module, [alias.name for alias in node.names]


def lacks(module: str, path: str, parameters: tuple[str, ...] = ()) -> str | None:
    """Return the missing name, or None."""
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"{module}.{path}"
    known = inspect.signature(found).parameters if parameters else {}
    missing = [name for name in parameters if name not in known]
    return f"{module}.{path}({', '.join(missing)})" if missing else None


def test_transformers_has_all_names_that_our_integration_uses():
    wanted = [(module, name, ()) for module, names in imported() for name in names]
    wanted += [(f"transformers.{m}", name, more) for m, used in USED.items() for name, more in used.items()]
    assert len(wanted) > 30
    lacking = [lack for lack in (lacks(*what) for what in wanted) if lack]
    message = f"liger_models/hf does not fit transformers {transformers.__version__}, which lacks {lacking}"
    assert not lacking, message
    mapping = transformers.AutoModelForCausalLM._model_mapping
    assert isinstance(mapping._extra_content, dict), message


def test_a_release_that_lacks_a_name_breaks_no_import_and_the_error_names_it(monkeypatch):
    import transformers.utils.generic

    import liger_models.hf

    monkeypatch.setattr(liger_models, "hf", liger_models.hf)  # which an import replaces
    for name in [name for name in sys.modules if name.startswith("liger_models.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(transformers.utils.generic, "can_return_tuple")
    hf = importlib.import_module("liger_models.hf")
    with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} .*can_return_tuple"):
        hf.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install liger_models\[hf\]"):
        hf.LigerForCausalLM  # noqa: B018
