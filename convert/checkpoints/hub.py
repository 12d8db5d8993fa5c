"""Checkpoint folders from and to the Hugging Face hub, using the hub's own client.

The client caches, resumes interrupted downloads and retries; this module only chooses files and explains
failures. The files of a language model are always selected by the same patterns: the client remembers the
patterns of a snapshot, and offline it cannot widen them.
"""

import errno
import os
import tempfile
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.safetensors_header import DTYPES
from liger_models.convert.errors import CheckpointError, ConfigError, HubError, LigerModelsError, abbreviate
from liger_models.convert.json_file import read_json

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
ADAPTER_CONFIG = "adapter_config.json"
CHAT_TEMPLATES = "additional_chat_templates"  # a folder of templates by name
MODULES = "[0-9]_*"  # folders of sentence-transformers' modules after the model, such as 1_Pooling
# Other subfolders and files of this name hold other formats of the same weights. Templates are small.
_OTHER_FOLDERS = ("[!0-9]*", "[0-9][!_]*")
IGNORE_PATTERNS = [
    *(f"{folder}/{name}" for folder in _OTHER_FOLDERS for name in ALLOW_PATTERNS if name != "*.jinja"),
    *("*/*/*", "consolidated*"),
]


def resolve(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    adapter: bool = False,
) -> Path:
    """The local folder of a checkpoint: the given folder, or one downloaded from the hub or found in the
    cache.

    Args:
        name_or_path: a folder, that of a training run (for its latest checkpoint), or a repository on the hub
            such as `"meta-llama/Llama-3.2-1B"`.
        revision: a branch, a tag or a commit of the repository. Default: its main branch.
        token: the hub's access token; True demands the stored one, None uses it if there is one.
        cache_dir: of the hub's client. Default: its own.
        local_files_only: use the cache and no network.
        adapter: accept a PEFT adapter without a model, too.

    Raises:
        CheckpointError: the folder has no config.json, or the repository no safetensors weights.
        HubError: the repository or revision does not exist, is gated or private, or could not be downloaded.
    """
    folder = local_path(latest_in_run(name_or_path))
    if folder.exists() or isinstance(name_or_path, Path) or _looks_like_a_path(name_or_path):
        if _is_adapter(folder, folder, adapter):
            return folder
        if not (folder / "config.json").is_file():
            state = "has no config.json" if folder.is_dir() else "is not a folder"
            raise CheckpointError(
                f"{folder}: {state}; expected the folder of a checkpoint, or the name of a repository on "
                "the hub (owner/name)"
            )
        return folder

    from huggingface_hub import snapshot_download

    repo_id = str(name_or_path)
    try:
        snapshot = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=ALLOW_PATTERNS,
            ignore_patterns=IGNORE_PATTERNS,
        )
    except _client_errors() as error:
        raise _explained(error, "download", repo_id, revision) from error
    folder = Path(snapshot)
    if _is_adapter(folder, repo_id, adapter):
        return folder
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{repo_id}: the repository has no safetensors weights at its top level; pickles (*.bin, "
            "*.pth) can run any code when opened and are not read: convert them where you trust them, "
            "with transformers' from_pretrained and save_pretrained"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{repo_id}: the repository has no config.json; expected a language model")
    return folder


def _is_adapter(folder: Path, name: object, accepted: bool) -> bool:
    """Whether a folder holds an accepted adapter.

    Raises:
        CheckpointError: it is not accepted, or there is a model as well: the weights alone, without the
            adapter, would be another model.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name}: holds a PEFT adapter ({ADAPTER_CONFIG}) and a model; remove {ADAPTER_CONFIG} to use "
            "the model's weights without it, or load both with liger_models.hf, as transformers does"
        )
    if not accepted:
        raise CheckpointError(
            f"{name}: holds a PEFT adapter ({ADAPTER_CONFIG}) but no model; to merge it into its base model, "
            "run: liger-models merge ADAPTER OUT"
        )
    return True


def latest_in_run(name: str | Path) -> str | Path:
    """The latest checkpoint of a training run's folder, or its `final`; other names unchanged."""
    folder, configs = local_path(name), ("config.json", ADAPTER_CONFIG)
    if folder.is_dir() and not any((folder / config).exists() for config in configs):
        numbered = {path.name.partition("-")[2]: path for path in folder.glob("checkpoint-*")}
        steps = [int(number) for number in numbered if number.isdecimal()]
        run = [folder / "final", *([numbered[str(max(steps))]] if steps else [])]
        written = [path / config for path in run for config in configs if (path / config).is_file()]
        if written:  # `final` is older if a resumed run was stopped
            return str(max(written, key=lambda path: path.stat().st_mtime).parent)
    return name


def local_path(name: str | Path, error: type[LigerModelsError] = CheckpointError) -> Path:
    """Expand `~` in a path, and check that the system can look it up.

    Raises:
        CheckpointError, or the given `error`: unknown user, or the path is too long.
    """
    try:
        path = Path(name).expanduser()
        os.path.lexists(path) or path.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{abbreviate(str(name))} is not a usable path: {reason}") from problem
    return path


def belongs_to(file: Path, folder: Path) -> bool:
    """Whether a file of a checkpoint folder belongs to it, and may be copied into an export.

    A link may lead elsewhere in the folder, or to the blobs of the cache if the folder is one of its
    snapshots (`<repository>/snapshots/<commit>`, `<repository>/blobs`). Any other link might lead to a
    private file, which an export must not publish; a warning says so.
    """
    real, home = file.resolve(), folder.resolve()
    repository = home.parent.parent
    if real.is_relative_to(home) or (
        home.parent.name == "snapshots" and real.is_relative_to(repository / "blobs")
    ):
        return True
    warnings.warn(f"{file} links out of its folder, to {real}: exports omit it", stacklevel=2)
    return False


def read_headers(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Read the config of a repository, and the dtype and the shape of each of its tensors, without
    downloading
    weights.

    Nothing is written to the cache, where a partial checkpoint would shadow a complete one.

    Raises:
        CheckpointError: the repository has no safetensors weights.
        ConfigError: its config.json is not a JSON object.
        HubError: as for `resolve`.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        # This fails at once, where the hub's other calls try for 30 s.
        files = api.model_info(repo_id, revision=revision).siblings or ()
        names = [file.rfilename for file in files]
        with tempfile.TemporaryDirectory() as cache:
            config = api.hf_hub_download(repo_id, "config.json", revision=revision, cache_dir=cache)
            raw = read_json(Path(config), ConfigError)
        top = [name for name in names if "/" not in name and not _ignored(name)]
        weights = [name for name in top if name.endswith(".safetensors")]
        headers = [api.parse_safetensors_file_metadata(repo_id, n, revision=revision) for n in weights]
    except _client_errors() as error:
        raise _explained(error, "read", repo_id, revision) from error
    if not headers:
        raise CheckpointError(f"{repo_id}: the repository has no safetensors weights at its top level")
    found = {name: info for header in headers for name, info in header.tensors.items()}
    return raw, {
        name: (str(DTYPES.get(info.dtype, info.dtype)).removeprefix("torch."), tuple(info.shape))
        for name, info in found.items()
    }


def _ignored(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in IGNORE_PATTERNS)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model",
    revision: str | None = None,
) -> str:
    """Upload a folder to the hub in one commit, creating the repository and the branch if necessary.

    Args:
        private: visibility of a new repository. Default: the owner's setting.
        revision: the branch. Default: main.

    Returns:
        The URL of the commit.

    Raises:
        HubError: not logged in, not allowed, or the upload failed.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision
        )
    except _client_errors() as error:
        raise _explained(error, "upload", repo_id, revision) from error
    return str(commit.commit_url)


def _looks_like_a_path(name: str) -> bool:
    begin, slash, _ = name.partition("/")  # the name of a repository has an owner and no folder of that name
    in_folder = bool(slash) and Path(begin).is_dir()
    return in_folder or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or os.path.isabs(name)


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # The client's HTTP library depends on its version; its base error is the first base class of the client's
    # own.
    http_error: Any = HfHubHTTPError.__bases__[0]
    return (OSError, ValueError, http_error)


def _explained(error: Exception, action: str, repo_id: str, revision: str | None) -> HubError:
    """HubError with cause and remedy in one sentence."""
    from huggingface_hub import errors

    what = repo_id if revision is None else f"{repo_id} at revision {revision!r}"
    if "/" not in repo_id:
        what += " (there is no folder of this name)"
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.HFValidationError):
        reason = (
            f"this is not the name of a repository ({error}); expected owner/name, or the path of a folder"
        )
    elif isinstance(error, errors.GatedRepoError):
        reason = "the repository is gated: accept its licence on its page, then log in with `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "there is no such repository, or it is private: check the name, or log in with `hf auth login`"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "the repository has no such branch, tag or commit"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = (
            "it is not completely in the cache, and the hub was not asked or did not answer: check the "
            f"network, and that offline mode is not on by mistake ({_cause(error)})"
        )
    elif status in (401, 403):
        reason = f"the hub refused (HTTP {status}): check that your token is valid and allows you to {action}"
    elif status is not None:
        reason = f"the hub answered HTTP {status} ({error}); try again later"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        other = ", or choose another with cache_dir=" if action == "download" else ""
        reason = f"the disk of the cache is full{where}: free space{other}"
    else:
        kept = ": completed downloads are kept" if action == "download" else ""
        reason = f"{type(error).__name__}: {error}; check the network and try again{kept}"
    missing = errors.LocalEntryNotFoundError, errors.RepositoryNotFoundError
    if action == "download" and "/" in repo_id and isinstance(error, missing):
        reason += ". Nor is there a folder of this name"
    return HubError(f"cannot {action} {what}: {reason}")


def _cause(error: BaseException) -> str:
    """First line of the underlying network error."""
    below = error.__cause__ or error
    return f"{type(below).__name__}: {str(below).splitlines()[0] if str(below) else ''}"
