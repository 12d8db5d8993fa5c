"""Settings of a run as a file: YAML or JSON in, YAML out.

`settings_text` writes a flat mapping from option to value, with which the command line starts the same run
again: `liger-models train --config OUTPUT/config.yaml --output ANOTHER`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_models.convert.errors import ConfigError, TrainingError
from liger_models.convert.json_file import parse_json
from liger_models.training.checkpoints.run_folder import SETTINGS, SETTINGS_HEAD

if TYPE_CHECKING:
    from liger_models.training.config import TrainConfig


def read_settings(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file.

    Raises:
        ConfigError: the file is unreadable, malformed or not a mapping, it names a key twice, or YAML needs
            PyYAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path} cannot be read ({reason})") from error
    if path.suffix == ".json":
        return parse_json(text.encode(), f"--config {path}", ConfigError)
    try:
        settings = _load_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is malformed: {error}") from error
    except ImportError as error:
        raise ConfigError(
            f"--config {path}: YAML needs PyYAML, which is not installed: pip install pyyaml, or pass a "
            ".json file"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} holds {type(settings).__name__}; expected options and values")
    return settings


def _load_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"it names {twice[0]!r} twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def write_settings(config: TrainConfig, output: Path) -> None:
    """Write the settings to config.yaml in a run's folder.

    Raises:
        TrainingError: the file cannot be written.
    """
    try:
        text = SETTINGS_HEAD + settings_text(config)
        (output / SETTINGS).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"{output / SETTINGS} cannot be written ({error.strerror or error})") from error


def settings_text(config: TrainConfig) -> str:
    """The settings of a run as YAML, without unset ones and `resume`."""
    settings = config.to_dict()
    settings |= settings.pop("objective_options")
    del settings["resume"]
    if adapter := settings.pop("adapter"):  # as on the command line
        settings |= {"model": adapter, "base": config.model}
    return "".join(
        f"{name}: {_yaml(value)}\n" for name, value in settings.items() if value not in (None, (), [])
    )


def _yaml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a string
    return text
