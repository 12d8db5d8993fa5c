"""Model classes for each family and task, generated from the registry and added to the Auto classes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import UnsupportedModelError
from liger_models.hf.base_model import LigerModel
from liger_models.hf.checkpoints.dense import family_of
from liger_models.hf.checkpoints.unread import own_class
from liger_models.hf.models import HEAD, LigerForCausalLM, LigerForSequenceClassification
from liger_models.hf.pretrained import LigerPreTrainedModel
from liger_models.hf.vision import METHODS, LigerForConditionalGeneration


class FamilyClasses(NamedTuple):
    """Classes of one family, named after transformers': `LigerLlamaForCausalLM`, and so on. Vision-language
    families have no classifier.
    """

    base: type[LigerModel]
    causal_lm: type[LigerForCausalLM]
    sequence_classification: type[LigerForSequenceClassification] | None


def register(projections: Literal["fused", "split"] = "fused") -> None:
    """Make transformers' Auto classes return our models for every family that both libraries have. This
    includes `AutoModelForImageTextToText` and the other Auto classes for vision-language models.

        liger_models.hf.register()
        model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")  # a LigerLlamaForCausalLM

    The class names in `transformers` itself are replaced too, because TRL looks up models given as strings
    and reference models there: `transformers.LlamaForCausalLM` is then ours. Classes imported earlier do not
    change, and transformers' own stay in their modules, such as `transformers.models.llama.modeling_llama`.

    Args:
        projections: "fused" packs query, key and value into one layer, and gate and up into another, which
            is faster. "split" keeps them separate, under the names that LoRA libraries and bitsandbytes look
            for. `model.split_projections()` splits one model.
    """
    if projections not in ("fused", "split"):
        raise ValueError(f"projections must be 'fused' or 'split', found {projections!r}")
    LigerPreTrainedModel.projections = projections
    by_name = {}
    for model_type in (*list_architectures(), *list_architectures(vision=True, audio=True)):
        if model_type in CONFIG_MAPPING:
            for auto, model in _places(model_type):
                # In some versions its own `register` ignores the configs of transformers itself.
                auto._model_mapping._extra_content[CONFIG_MAPPING[model_type]] = model
                if auto._model_mapping[CONFIG_MAPPING[model_type]] is not model:
                    raise RuntimeError(
                        f"this transformers ({transformers.__version__}) keeps its own {model_type}; use "
                        f"liger_models.hf.classes_of({model_type!r}) in place of {auto.__name__}"
                    )
            architecture = find_architecture(model_type)
            if architecture.reference_of is None:
                by_name[architecture.reference] = classes_of(model_type).causal_lm
    for module in _all_transformers():  # call once: it scans all modules
        vars(module).update(by_name)


def unregister() -> None:
    """Restore the Auto classes and the names to transformers' own models."""
    for auto in _auto_classes():
        extra: dict[Any, Any] = auto._model_mapping._extra_content
        for config in [config for config, model in extra.items() if _is_ours(model)]:
            del extra[config]
    for module in _all_transformers():
        for name, model in list(vars(module).items()):
            if isinstance(model, type) and issubclass(model, LigerForCausalLM):
                delattr(module, name)  # transformers loads its own on the next access


def _is_ours(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, LigerPreTrainedModel)


def _auto_classes() -> list[Any]:
    return [found for name, found in vars(modeling_auto).items() if name.startswith("AutoModel")]


def _places(model_type: str) -> Iterator[tuple[Any, Any]]:
    """Yield (Auto class, our model class) pairs of a family."""
    classes, reference = classes_of(model_type), find_architecture(model_type).reference
    if classes.sequence_classification is not None:
        yield AutoModel, classes.base
        yield AutoModelForCausalLM, classes.causal_lm
        yield AutoModelForSequenceClassification, classes.sequence_classification
        return
    for auto in _auto_classes():
        named = auto._model_mapping._model_mapping.get(model_type)
        if named == reference:
            yield auto, classes.causal_lm
        elif auto is AutoModel:
            yield auto, classes.base


def _all_transformers() -> list[Any]:
    """Find both copies of the module `transformers`. It is recreated when its processors are first accessed,
    and earlier importers (TRL, the user's script) keep the first copy.
    """
    kind, found = type(transformers), {id(transformers): transformers}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is kind and value.__name__ == "transformers":
                found[id(value)] = value
    return list(found.values())


@functools.cache
def classes_of(model_type: str) -> FamilyClasses:
    """Return the classes of a family.

    Raises:
        UnsupportedModelError: the family is not registered here, or this transformers does not have it.
    """
    architecture = find_architecture(model_type)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not have {model_type!r}, whose config class is "
            "needed here: install a release that has it, or use liger_models.from_hub, which needs none"
        )
    reference = architecture.reference
    if architecture.reference_of:  # its classes are named after its config
        reference = CONFIG_MAPPING[model_type].__name__.replace("Config", "ForCausalLM")
    # transformers selects checkpoint converters by class name, so ours must differ from its own.
    fields = {
        "architecture": architecture,
        "config_class": CONFIG_MAPPING[model_type],
        "__module__": __name__,
    }

    def make(name: str, kind: type, **more: Any) -> Any:
        # Tools look for GenerationMixin among the direct bases.
        bases = (kind, GenerationMixin) if issubclass(kind, GenerationMixin) else (kind,)
        return type(f"Liger{name}", bases, {**fields, "__doc__": kind.__doc__, **more})

    family = reference.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    named = AutoModel._model_mapping._model_mapping.get(model_type)
    named = named if named not in (None, reference) and not architecture.reference_of else f"{family}Model"
    if architecture.multimodal:
        theirs = own_class(CONFIG_MAPPING[model_type], reference)
        their_base = getattr(sys.modules[theirs.__module__], named, theirs)
        base = make(named, LigerModel, **_methods_of(their_base))
        more = {name: getattr(theirs, name, None) for name in _AS_THEIRS} | _methods_of(theirs)
        made = FamilyClasses(
            base, make(reference, LigerForConditionalGeneration, base_class=base, **more), None
        )
    else:
        layout = architecture.modules_layout
        prefix = {"base_model_prefix": layout.root.partition(".")[0]}
        tied = {layout.name(HEAD): layout.name("embed_tokens.weight")}
        base = make(named, LigerModel, **prefix)
        of_base = {"base_class": base, **prefix}
        made = FamilyClasses(
            base,
            make(reference, LigerForCausalLM, **of_base, _tied_weights_keys=tied),
            make(f"{family}ForSequenceClassification", LigerForSequenceClassification, **of_base),
        )
        if borrowers := _borrowers(model_type):
            for field, model in made._asdict().items():
                model.from_pretrained = _for_borrowers_too(model, field, borrowers)
    globals().update({model.__name__: model for model in made if model is not None})  # for pickle
    return made


def _borrowers(model_type: str) -> frozenset[str]:
    """The families whose class in transformers is that of this one."""
    registered = map(find_architecture, list_architectures())
    return frozenset(found.model_type for found in registered if found.reference_of == model_type)


def _for_borrowers_too(model: Any, field: str, borrowers: frozenset[str]) -> Any:
    """`from_pretrained` of a class whose name transformers writes into the configs of other families, too: it
    loads such a checkpoint with the class of its own family, whose names of keys and tensors differ.
    """
    load = model.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        if cls is model and (found := family_of(args, options)) in borrowers:
            return getattr(classes_of(found), field).from_pretrained(*args, **options)
        return load(cls, *args, **options)

    return classmethod(from_pretrained)


def _methods_of(theirs: Any) -> dict[str, Any]:
    """Select the entries of METHODS that transformers' own class also has."""
    return {name: method for name, method in METHODS.items() if hasattr(theirs, name)}


_AS_THEIRS = ("_tied_weights_keys", "_keys_to_ignore_on_load_unexpected")
