"""Log-probabilities of answers under the reference model, for DPO and KTO: computed once before training, and
cached on disk.

The reference is the model before training: the run's initial model or, when training new adapters, the model
without them. Scores are stored with the tokenized data, one file per corpus, named by a digest of the
reference's weights, dtype and quantisation, the corpus, and the objective's sum over tokens. A resumed run
finds them there, or loads the reference again. `load_second_model` loads other models, such as a teacher.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.hub import ADAPTER_CONFIG, local_path, resolve
from liger_models.convert.errors import ConfigError, DataError
from liger_models.losses import without_adapters
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.loading import from_hub
from liger_models.training.config import TrainConfig
from liger_models.training.data import Groups, Stream
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.documents import Documents, Part
from liger_models.training.data.tokenizing import default_cache
from liger_models.training.lora import TENSORS
from liger_models.training.objectives.objective import Objective, score_rows
from liger_models.training.processes.world import World
from liger_models.training.text.tokenizer import TextTokenizer

FORMAT = 1
Mark = Callable[[str], object]


def add_reference(
    config: TrainConfig,
    world: World,
    objective: Objective,
    parts: Iterable[Documents | None],
    model: LigerCausalLM,
    load: Callable[[], LigerCausalLM] | None,
    mark: Mark,
) -> None:
    """Attach reference scores to the corpora of these documents.

    Args:
        model: the trained model.
        load: loads the reference if the model has changed; None: the model without adapters is the reference.
        mark: called with the current activity.

    Raises:
        DataError: the scores cannot be written.
    """
    documents = [one for one in parts if isinstance(one, Groups)]
    shares = any(one.shares for one in documents)
    corpora = {part.corpus.folder: part.corpus for one in documents for part in one.parts}
    weights = world.once(lambda: _digest_of_weights(config.model, config.adapter))
    new_adapters = config.lora is not None and config.adapter is None
    about = [FORMAT, weights, str(model.dtype), config.quantize, config.text_only, *objective.about_sums()]
    reference: LigerCausalLM | None = None
    for corpus in corpora.values():
        key = hashlib.sha256(json.dumps([*about, corpus.digest]).encode()).hexdigest()[:32]
        folder = local_path(config.data_cache, DataError) if config.data_cache else default_cache()
        path = folder / f"reference-{key}.safetensors"
        scores = world.once(lambda path=path, corpus=corpus: _read(path, len(corpus)))  # type: ignore[misc]
        if scores is None:
            if reference is None:
                reference = model if load is None else load()
            aside = without_adapters(model) if new_adapters else contextlib.nullcontext()
            scores = _score(reference, objective, corpus, config, world, aside, mark, shares)
            world.once(lambda path=path, scores=scores: _write(path, scores))  # type: ignore[misc]
        else:
            world.say(f"scores of the reference: taken from {path}")
        corpus.reference = scores


@torch.no_grad()
def _score(
    model: LigerCausalLM,
    objective: Objective,
    corpus: Corpus,
    config: TrainConfig,
    world: World,
    aside: AbstractContextManager[None],
    mark: Mark,
    shares: bool,
) -> Tensor:
    """Log-probabilities of a corpus's groups, [groups, 2] float32, computed by all processes together."""
    from liger_models.convert.progress import ProgressBar

    groups = Groups([Part(corpus)], model.spec.vision)
    groups.shares = shares
    rows, at_once = Stream(groups, config.seq_len, seed=0).epoch(0), world.data_size * config.batch_size
    found, training = torch.zeros(len(corpus), 2), model.training
    model.eval()
    with (
        aside,
        ProgressBar(
            desc="reference",
            total=len(corpus),
            unit="group",
            disable=not world.main,
        ) as bar,
    ):
        while taken := list(itertools.islice(rows, at_once)):
            mark("scores of the reference")
            own = taken[world.data_rank * config.batch_size :][: config.batch_size]
            # Sharded models run on all processes: those without remaining rows repeat others' batches.
            batch = groups.batch(own or taken[: config.batch_size]).to(world.device)
            sums = torch.cat(
                [objective.sums(call, score_rows(model, call).log_probs) for call in batch.calls()]
            )
            if own:
                found[groups.documents_of(own)] = sums.view(2, -1).T.cpu()
            bar.update(sum(map(len, taken)))
    model.train(training)
    return world.sum(found.to(world.device)).cpu()


def _digest_of_weights(name: str, adapter: str | None) -> str:
    folder, digest = resolve(name), hashlib.sha256()
    paths = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    if adapter:
        paths += [Path(adapter) / file for file in (ADAPTER_CONFIG, TENSORS)]
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _read(path: Path, count: int) -> Tensor | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        return None
    with contextlib.suppress(SafetensorError, OSError, KeyError):  # a damaged file is recomputed
        scores = load_file(path)["log_probs"]
        if scores.shape == (count, 2) and scores.dtype == torch.float32 and bool(scores.isfinite().all()):
            return scores
    return None


def _write(path: Path, scores: Tensor) -> None:
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"log_probs": scores}, temporary)
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free space, or pass another folder with "
            "--data-cache"
        ) from error


def load_second_model(
    config: TrainConfig, world: World, tokenizer: TextTokenizer, name: str
) -> LigerCausalLM:
    """Load another model, such as a teacher, with the trained one's dtype and sharding, without gradients.

    Raises:
        ConfigError: its tokenizer is missing or has another vocabulary.
        CheckpointError, HubError: it cannot be loaded.
    """
    folder = resolve(name)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{name} has no tokenizer.json, so its vocabulary cannot be compared with that of "
            f"{config.model}; put the tokenizer's files next to its weights"
        )
    theirs, ours = (one.backend.get_vocab() for one in (TextTokenizer(folder), tokenizer))
    if differ := sorted(token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)):
        raise ConfigError(
            f"the tokenizer of {name} has a different vocabulary than that of {config.model}: "
            f"{len(differ)} tokens differ, {differ[0]!r} among them; choose a model with the same one"
        )
    options: dict[str, Any] = {"device": world.device, "attention": config.attention, "shard": world.divide}
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    return from_hub(name, dtype=dtype, **options).requires_grad_(False).eval()
