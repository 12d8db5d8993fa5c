"""Exception types. Every message says what was found, what was expected and what to do."""


class LigerModelsError(Exception):
    """Base class of the errors that this package raises on purpose."""


class UnsupportedModelError(LigerModelsError):
    """The config names a model that no registered architecture implements."""


class ConfigError(LigerModelsError):
    """config.json has an unsupported key or value."""


class CheckpointError(LigerModelsError):
    """A checkpoint's files are missing, damaged, or not what the model needs."""


class HubError(LigerModelsError):
    """The Hugging Face hub refused, lacks, or could not deliver the requested data."""


class DataError(LigerModelsError):
    """Training data, token ids or labels that cannot be used."""


class TrainingError(LigerModelsError):
    """Training cannot continue: the loss or the gradient is not finite."""


def abbreviate(value: object) -> str:
    """Short text of a value, for error messages."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
