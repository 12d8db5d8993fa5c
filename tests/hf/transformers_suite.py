"""Run transformers' own test suite on our classes.

    python tests/hf/transformers_suite.py FOLDER                    # the families below, our classes
    python tests/hf/transformers_suite.py FOLDER llama -k generate  # some families, some tests
    python tests/hf/transformers_suite.py FOLDER --theirs           # transformers' own classes, to compare

FOLDER holds conftest.py and the folder `tests` of transformers' repository, at the installed version or close
to it. The suite needs `parameterized`. Each family runs in a process of its own, where our classes replace
those of transformers in the test modules and model testers.

Failures that are not listed in KNOWN are reported, and so are listed ones that occur in no family of the run.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FAMILIES = {
    "llama": ("llama",),
    "gemma2": ("gemma2",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "phi3": ("phi3",),
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe",),
    "gpt_oss": ("gpt_oss",),
    "deepseek_v3": ("deepseek_v3",),
    "gemma3": ("gemma3_text", "gemma3"),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "llava": ("llava",),
}
"""Folders of tests, and the model types whose classes are replaced there."""

LEFT_OUT = (
    *("test_pipeline_mixin", "test_tensor_parallel_mixin", "test_fsdp_mixin", "test_expert_parallel_mixin"),
)
"""Modules whose tests are not run.

Pipelines need the hub, as integration tests do, and the others need plans that transformers has for its own
modules only.
"""

_ADDED_NAMES = """
    rms_norm_eps layer_norm_eps norm_eps norm_epsilon layer_norm_epsilon batch_norm_eps post_norm_eps
    first_k_dense_replace moe_layer_start_index mlp_only_layers num_dense_layers expert_interval seq_length
    is_training use_input_mask use_labels hidden_dropout_prob attention_probs_dropout_prob type_vocab_size
    type_sequence_label_size num_choices dropout attention_dropout
"""
ADDED_KEYS = tuple(_ADDED_NAMES.split())
"""Config keys that tests set on families that do not have them, and dropout; they are ignored."""

CHANGES: dict[str, dict[str, Any]] = {
    # Eight experts per token cannot come from the single group of four that the tester allows: an error here.
    "DeepseekV3ModelTester": {"num_experts_per_tok": 4},
    # An image has one token after pooling, but the tester's config says two: an error here.
    "Gemma3Vision2TextModelTester": {"mm_tokens_per_image": 1},
}
"""Attributes of model testers whose configs are impossible, by class."""

KNOWN = {
    r"test_gradient_checkpointing_enable_disable|test_training_gradient_checkpointing.*": (
        "looks for transformers' GradientCheckpointingLayer; our layers are recomputed by activation_memory"
    ),
    r"test_model_get_set_embeddings": (
        "a plain nn.Embedding that is set becomes one of ours, which keeps the family's scale"
    ),
    r"test_model_rope_scaling_from_config.*": (
        "positions beyond max_position_embeddings are an error, and the test has 1.5 times as many"
    ),
    r"test_reverse_loading_mapping": (
        "expects patterns in the conversion mapping; our entry has the exact names of all tensors"
    ),
    r"test_(tied_head_has_a_tp_plan_entry|tied_weights_are_sharded_together|tp_plan_matches_params)": (
        "transformers' plans for dividing a model are for its own modules, and are refused"
    ),
    r"(test_eager_matches_sdpa_inference_24_fp32_pad_left_output|.*test_bidirectional_image)_attentions?": (
        "asks for attention weights, which our models never compute"
    ),
    r"GptOss.*test_can_load_from_already_mapped_keys": (
        "save_original_format=False writes experts transposed under the same names; reading them is an error"
    ),
    r"(Qwen2_5_VL|Gemma3Vision|Llava).*test_eager_matches_sdpa_inference.*": (
        "tokens of images without pixels are an error"
    ),
    r"(Qwen2_5_VL|Gemma3Vision|Llava).*test_inputs_embeds.*": (
        "images with embeddings and without input_ids are an error"
    ),
    r"(Qwen2_5_VL|Gemma3Vision|Llava).*test_get_(image|video)_features_(hidden_states|output).*": (
        "of an encoder's outputs only the projected features are returned"
    ),
    r"(Qwen2_5_VL|Gemma3Vision|Llava).*test_bc_cache_name_forward": (
        "the older name of a cache is taken without a warning"
    ),
    r"(Qwen2_5_VL|Gemma3Vision|Llava).*test_mismatching_num_image_tokens": (
        "expects ValueError; ours is DataError"
    ),
    r"Qwen2_5_VL.*test_(video_forward|.*padding_matches_padding_free_with_position_ids)": (
        "pixels without mm_token_type_ids are an error"
    ),
    r"(Qwen2_5_VL|Gemma3Vision).*test_generate_continue_from_past_key_values": (
        "gives images without pixels or without kinds of tokens, which is an error"
    ),
    r"Gemma3Vision.*test_training": "tokens of images without pixels are an error",
    r"Gemma3TextModelTest::test_generation_beyond_sliding_window_tiny_model": (
        "reads a config from the hub, and the suite runs offline"
    ),
}
"""Failures that are expected: a pattern of tests, `test` or `Class::test`, and the reason."""

RESULTS = "TRANSFORMERS_SUITE_RESULTS"
MODEL_TYPES = "TRANSFORMERS_SUITE_MODEL_TYPES"


def main() -> int:
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="holds transformers' tests folder and its conftest.py")
    parser.add_argument("families", nargs="*", metavar="family", help=f"default: {', '.join(FAMILIES)}")
    parser.add_argument("-k", dest="keyword", help="run only tests that match, as in pytest")
    parser.add_argument("--theirs", action="store_true", help="run transformers' own classes")
    options = parser.parse_args()
    complete(options.folder)
    unexpected, seen = 0, Counter[tuple[str, str]]()
    for family in options.families or FAMILIES:
        outcomes = run_family(options.folder, family, options.keyword, options.theirs)
        counts = Counter(outcomes.values())
        found = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"{family:12} {found}", flush=True)
        for test, outcome in sorted(outcomes.items()):
            pattern = None if options.theirs else known(test)
            if pattern is not None:
                seen[pattern, outcome] += 1
            elif outcome == "failed":
                unexpected += 1
                print(f"    failed: {test}", flush=True)
    for pattern in KNOWN:
        if seen[pattern, "passed"] and not seen[pattern, "failed"]:
            unexpected += 1
            print(f"listed, but passed wherever it ran: {pattern}")
    return 1 if unexpected else 0


def known(test: str) -> str | None:
    """Return the pattern that lists a test, `Class::test`, as an expected failure."""
    names = test, test.rpartition("::")[2]
    return next((p for p in KNOWN if any(re.fullmatch(p, name) for name in names)), None)


def complete(folder: Path) -> None:
    """Add files that the tests import from elsewhere in the repository, if the folder lacks them."""
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    if not (folder / "src").exists():
        (folder / "src").mkdir()
        (folder / "src" / "transformers").symlink_to(Path(package.origin).parent)
    missing = {
        "utils": {"fetch_hub_objects_for_ci.py": "def url_to_local_path(url, *others):\n    return url\n"},
        "tests/utils": {
            "__init__.py": "",
            "test_configuration_utils.py": "config_common_kwargs = {}\n",
            "tiny_model_summary.json": "{}\n",
        },
    }
    for path, files in missing.items():
        if not (folder / path).exists():
            (folder / path).mkdir()
            for name, content in files.items():
                (folder / path / name).write_text(content, encoding="utf-8")


def run_family(folder: Path, family: str, keyword: str | None, theirs: bool) -> dict[str, str]:
    """Run the tests of a family; return "passed", "failed" or "skipped" by `Class::test`."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parent),
            RESULTS: str(results),
            MODEL_TYPES: "" if theirs else ",".join(FAMILIES.get(family, (family,))),
        }
        command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        command += [
            "-q",
            "--disable-warnings",  # leaves them out of the output alone, since some tests expect warnings
            "--rootdir",
            ".",
            "--tb=short",
            *(["-k", keyword] if keyword else []),
        ]
        command.append(f"tests/models/{family}/test_modeling_{family}.py")
        subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=False)
        found: dict[str, str] = json.loads(results.read_text(encoding="utf-8"))
        if not found:
            sys.exit(f"{family}: no test ran; see the output of pytest above")
        return found


# -- in the process of a family, in which pytest loads this module as a plugin


def pytest_configure(config: Any) -> None:
    config.our_classes = {}
    if not os.environ[MODEL_TYPES]:
        return
    import liger_models.hf
    from liger_models.hf import base_model

    spec_of = base_model.spec_of
    base_model.spec_of = lambda family, config, ignored=(): spec_of(family, config, (*ignored, *ADDED_KEYS))
    liger_models.hf.register()
    for model_type in os.environ[MODEL_TYPES].split(","):
        for model in liger_models.hf.classes_of(model_type):
            if model is not None:
                config.our_classes[model.__name__.removeprefix("Liger")] = model
                _enter(model.__name__)


def _enter(name: str) -> None:
    """Add our name to transformers' mappings from which its tests choose labels."""
    from transformers.models.auto import modeling_auto

    for mapping in (value for key, value in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")):
        for key, names in list(mapping.items()):
            if name.removeprefix("Liger") in (names if isinstance(names, tuple | list) else (names,)):
                mapping[f"{key} of liger_models"] = name


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if config.our_classes:
        for cls in {item.cls for item in items}:
            cls.setUp = _with_our_classes(cls.setUp, config.our_classes)
        for module in {item.module for item in items}:
            vars(module).update({k: v for k, v in config.our_classes.items() if k in vars(module)})


def _is_left_out(item: Any) -> bool:
    home = getattr(item.function, "__module__", "").rpartition(".")[2]
    return item.cls is None or "Integration" in item.cls.__name__ or home in LEFT_OUT


def _with_our_classes(set_up: Any, ours: dict[str, Any]) -> Any:
    @functools.wraps(set_up)
    def replaced(test: Any) -> None:
        set_up(test)
        vars(test.model_tester).update(CHANGES.get(type(test.model_tester).__name__, {}))
        # Our models return no attention weights; tests that compare implementations need none.
        test.has_attentions = test.has_attentions and "eager_matches" in test._testMethodName
        for owner in (test, test.model_tester):
            for name in dir(owner):
                value = getattr(owner, name, None)
                if name.endswith("_model_classes") and value:
                    _put(owner, name, tuple(_counterparts(value, ours)))
                elif isinstance(value, type) and _is_model(value):
                    _put(owner, name, next(iter(_counterparts([value], ours)), None))

    return replaced


def _counterparts(models: Iterable[Any], ours: dict[str, Any]) -> list[Any]:
    """Our counterparts of these classes, where we have one.

    Registering already replaces some classes of transformers. Config classes are compared because the
    classifiers of Gemma 3 with and without images share a name.
    """
    named = ((model, ours.get(model.__name__.removeprefix("Liger"))) for model in models)
    return [own for model, own in named if own is not None and own.config_class is model.config_class]


def _put(owner: Any, name: str, value: Any) -> None:
    if not isinstance(getattr(type(owner), name, None), property):  # computed from the other attributes
        setattr(owner, name, value)


def _is_model(value: type) -> bool:
    from transformers import PreTrainedModel

    return issubclass(value, PreTrainedModel) and not value.__name__.startswith("Liger")


def pytest_runtest_logreport(report: Any) -> None:
    _OUTCOMES.setdefault(report.nodeid.partition("::")[2], []).append(report.outcome)


_OUTCOMES: dict[str, list[str]] = {}


def pytest_sessionfinish() -> None:
    worst = ("failed", "skipped", "passed")
    found = {test: min(outcomes, key=worst.index) for test, outcomes in _OUTCOMES.items()}
    Path(os.environ[RESULTS]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
