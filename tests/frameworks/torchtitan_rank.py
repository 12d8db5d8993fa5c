"""One rank of test_torchtitan.py: torchtitan's trainer with a model of ours, on a CPU.

Read FOLDER/model. Save FOLDER/out/checkpoint/step-1. Return what was loaded, the loss, gradients, and
parameters after the step.
"""

import types
from dataclasses import dataclass

import torch
import torchtitan.tools.utils as tools

# torchtitan supposes a GPU where it finds no device. Its name, memory and cache are all that it asks for.
about = {
    "get_device_name": lambda device: "cpu",
    "get_device_properties": lambda device: types.SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device_count": lambda: 1,
}
tools.device_type, tools.device_module = "cpu", types.SimpleNamespace(**about)

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402


def rows(rank):
    """ids, positions of two documents, and labels of a rank's row."""
    ids = torch.randint(5, 61, (1, 17), generator=torch.Generator().manual_seed(rank))
    labels = ids[:, 1:].clone()
    labels[:, : 2 + 3 * rank] = labels[:, 6] = -100  # ranks count different numbers; 6 ends a document
    return ids[:, :-1], torch.cat([torch.arange(7), torch.arange(9)])[None], labels


class Rows(BaseDataLoader):
    """The same row in every step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, **others):
        self.rank = dp_rank

    def __iter__(self):
        while True:
            ids, positions, labels = rows(self.rank)
            yield {"input": ids, "positions": positions}, labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **others):
        pass

    encode = decode = get_vocab_size = None


NoTokenizer.__abstractmethods__ = frozenset()


def results(folder, rank, ranks, *options):
    command = ["--module", "liger_models.integrations.torchtitan", "--config", "train"]
    command += ["--hf_assets_path", str(folder / "model"), "--dump_folder", str(folder / "out")]
    command += ["--checkpoint.enable", "--training.steps", "1", "--training.seq_len", "16"]
    command += ["--training.mixed_precision_param", "float32", "--training.max_norm", "1e9"]
    command += ["--optimizer.implementation", "for-loop", *options]
    config = ConfigManager().parse_args(command)
    config.dataloader, config.tokenizer = Rows.Config(), NoTokenizer.Config()
    if "--checkpoint.initial_load_in_hf" not in options:
        config.model_spec.model.weights = str(folder / "model")
    trainer = config.build()
    trainer.checkpointer.load(step=-1)
    (model,) = trainer.model_parts

    def whole(tensor):
        return tensor.full_tensor().clone()

    found = {"loaded": {name: whole(p.detach()) for name, p in model.named_parameters()}}
    losses, step = [], trainer.forward_backward_step
    trainer.forward_backward_step = lambda **call: losses.append(step(**call)) or losses[-1]
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    found["loss"] = losses[0].detach()
    found["gradients"] = {name: whole(p.grad) for name, p in model.named_parameters()}
    found["trained"] = {name: whole(p.detach()) for name, p in model.named_parameters()}
    trainer.checkpointer.save(1, last_step=True)
    trainer.close()
    return found
