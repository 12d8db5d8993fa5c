"""What goes wrong, as types. Every message says what was found, what was expected and what to do."""


class LigerModelsError(Exception):
    """The base of every error that this package raises on purpose."""


class UnsupportedModelError(LigerModelsError):
    """The config names a model that no registered architecture implements."""


class ConfigError(LigerModelsError):
    """config.json holds a key or a value that cannot be honoured."""


class CheckpointError(LigerModelsError):
    """A checkpoint's files are missing, damaged, or not what the model needs."""


class HubError(LigerModelsError):
    """The Hugging Face hub refused, lacks, or could not deliver what was asked for."""


class DataError(LigerModelsError):
    """Training data, token ids or labels that cannot be used."""


class TrainingError(LigerModelsError):
    """Training cannot go on: the loss or the gradient is no longer finite."""


def abbreviate(value: object) -> str:
    """A found value, as short as a message needs it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
