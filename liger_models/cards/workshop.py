"""One family's tiny checkpoint, written by its reference in transformers, and artefacts made from it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import random
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import liger_models
from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.images.pieces import documents_with_media
from liger_models.images.scenes import FIRST_OF_TEXT, Scenes
from liger_models.layers.specs import ModelSpec
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.verification import config_class, mask_as_family
from liger_models.training import TrainConfig, TrainResult, train

FILE_BYTES = 100_000  # splits a tiny checkpoint into several files
LETTERS = "abcdefghij "
STEPS = 4  # of the short run; a checkpoint is saved halfway


class NotRun(Exception):
    """A check cannot be run on this machine; the message names the missing requirement."""


class Workshop:
    """Makes the checkpoints for a family's checks, in `folder`.

    Attributes:
        architecture: the family.
        repository: a checkout with published configs and the benchmarks, if there is one.
    """

    def __init__(self, architecture: Architecture, folder: Path, repository: Path) -> None:
        self.architecture, self.folder, self.repository = architecture, folder, repository

    @property
    def reference_class(self) -> Any:
        """The family's class in transformers; None if the installed version lacks it."""
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return getattr(transformers, self.architecture.reference, None)

    @cached_property
    def reference(self) -> Any:
        """The reference of the family's tiny config, in float32, with random parameters."""
        config = config_class(self.architecture)(**copy.deepcopy(dict(self.architecture.tiny)))
        config._attn_implementation = "eager"
        model = self.reference_class(config)
        randomise(model, torch.Generator().manual_seed(1))
        mask_as_family(self.architecture, model)
        return model.eval()

    @cached_property
    def checkpoint(self) -> Path:
        """Checkpoint written by the reference."""
        path = self.folder / "reference"
        self.reference.save_pretrained(path, max_shard_size=FILE_BYTES)
        return path

    def load(self, folder: Path) -> LigerCausalLM:
        return liger_models.from_hub(folder, dtype=torch.float32, device="cpu").eval()

    def in_layout(self, layout: Layout) -> Path:
        """The same tensors in one of the family's layouts; for the reference's own layout, its files."""
        model = self.load(self.checkpoint)
        if layout == model.layout:
            return self.checkpoint
        path = self.folder / f"layout-{self.architecture.layouts.index(layout)}"
        model.layout, model.source = layout, None
        model.save_pretrained(path, max_shard_size=FILE_BYTES)
        return path

    def random_ids(self, *shape: int) -> Tensor:
        size = self.spec.num_labels
        return torch.randint(size, shape, generator=torch.Generator().manual_seed(2))

    @cached_property
    def spec(self) -> ModelSpec:
        return self.architecture.spec(HFConfig.load(dict(self.architecture.tiny)))

    def prompt(self, rows: int, length: int) -> dict[str, Any]:
        """Random ids, with images and sounds among them for multimodal models."""
        if not self.architecture.multimodal:
            return {"input_ids": self.random_ids(rows, length)}
        scenes = Scenes(self.spec, self.architecture.tiny, torch.Generator().manual_seed(2))
        call = scenes.make_even((documents_with_media(self.spec) * rows)[:rows])
        return {name: x for name, x in call.items() if name != "labels"}

    @cached_property
    def trained(self) -> TrainResult:
        """A short training run."""
        return self._train(self.folder / "run")

    @cached_property
    def resumed(self) -> TrainResult:
        """The same run, resumed from the checkpoint saved halfway."""
        halfway = Path(self.trained.final).parent / f"checkpoint-{STEPS // 2}"
        return self._train(self.folder / "resumed", resume=str(halfway))

    def _train(self, output: Path, **options: Any) -> TrainResult:
        text = self.folder / "text.jsonl"
        draw = random.Random(0)
        lines = ["".join(draw.choices(LETTERS, k=draw.randint(5, 60))) for _ in range(40)]
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        config = TrainConfig(
            model=str(self.checkpoint),
            data=(str(text),),
            output=str(output),
            tokenizer=str(self._tokenizer()),
            seq_len=48,
            batch_size=2,
            steps=STEPS,
            lr=1e-2,
            dtype="float32",
            device="cpu",
            save_every=STEPS // 2,
            keep=0,
            **options,
        )
        with contextlib.redirect_stderr(io.StringIO()):  # progress is printed there
            return train(config)

    def _tokenizer(self) -> Path:
        """A tokenizer with one token per letter, and an end token."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        path = self.folder / "tokenizer"
        path.mkdir(exist_ok=True)
        special = [f"<{number}>" for number in range(FIRST_OF_TEXT - 2)]  # some are image placeholders
        tokens = ["<end>", "<unknown>", *special, *LETTERS]
        ids = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        return path


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Randomise every parameter and every saved buffer: fresh norms are ones and fresh biases zeros, which
    would hide a mix-up.
    """
    with torch.no_grad():
        for name, tensor in _saved_once(model):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):  # states that last for some tokens; most initial decays are too fast
                tensor.copy_(0.5 * noise - 1.0)
            elif name.endswith("dt_bias"):  # steps of the order of one; initial ones are much smaller
                tensor.copy_(0.3 * noise)
            elif tensor.dim() > 1 and not name.endswith("norm.weight"):
                # scaled to keep activations and scores of order one
                of_pixels = tensor.dim() == 4 and tensor.shape[-1] == 1  # a matrix, stored as a convolution's
                tensor.copy_(noise / math.sqrt(tensor.shape[1 if of_pixels else -1]))
            elif name.endswith("layer_scale.gamma"):  # of dozens of branches, which would amplify rounding
                tensor.copy_(0.1 * noise)
            else:  # around the initial value: one for factors, zero for biases, or a bound
                tensor.nan_to_num_(posinf=1.0, neginf=-1.0).add_(0.3 * noise)
        for name, table in model.named_buffers():
            if name.endswith(EXPERTS_OF_IDS):  # different experts of each id
                experts = len(model.get_parameter(name.replace(EXPERTS_OF_IDS, "weight")))
                order = torch.rand(len(table), experts, generator=generator).argsort(1)
                table.copy_(order[:, : table.shape[1]])


EXPERTS_OF_IDS = "tid2eid"
"""Name of tables of the experts of each token id, next to a router's weight (DeepSeek-V4)."""


FOLLOWING = ("slope_rate", "_decay")
"""Ends of the names of saved buffers that the reference computes from its config (MiniMax)."""


def _saved_once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers of floating point, without tables that follow from the config."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and not name.endswith(FOLLOWING):
            yield name, buffer
