"""liger_models: language models for training, written natively over Triton kernels.

model = liger_models.from_hub("meta-llama/Llama-3.2-1B", device="cuda")
model(input_ids, labels=input_ids).loss.backward()
model.save_pretrained("out")
"""

from liger_models.architectures import list_architectures
from liger_models.causal_lm import LigerCausalLM
from liger_models.convert.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HubError,
    LigerModelsError,
    UnsupportedModelError,
)
from liger_models.loading import from_config, from_hub

from_pretrained = from_hub

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HubError",
    "LigerCausalLM",
    "LigerModelsError",
    "UnsupportedModelError",
    "from_config",
    "from_hub",
    "from_pretrained",
    "list_architectures",
]
