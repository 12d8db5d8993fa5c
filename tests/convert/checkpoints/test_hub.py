"""Responses of the hub, from a local fake server to the real client in a process of its own."""

import ast
import json
import os
import subprocess
import sys

import pytest
from fake_hub import FILES, UNWANTED, FakeHub, commit_id

from liger_models.convert.checkpoints.hub import ALLOW_PATTERNS, IGNORE_PATTERNS, resolve
from liger_models.convert.errors import CheckpointError

CLIENT = """
import json, sys
from liger_models.convert.checkpoints import hub
for line in sys.stdin:
    function, args, kwargs = json.loads(line)
    try:
        out = {"value": str(getattr(hub, function)(*args, **kwargs))}
    except Exception as error:
        out = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(out), flush=True)
"""


class Client:
    """`resolve` and `push` in a process whose environment names the fake server (read on import)."""

    def __init__(self, endpoint, home, **env):
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **env,
        }
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", CLIENT]
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, text=True
        )

    def __call__(self, function, *args, **kwargs):
        self.process.stdin.write(json.dumps([function, args, kwargs]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def hub():
    hub = FakeHub()
    yield hub
    hub.server.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub, home):
    client = Client(hub.endpoint, home)
    yield client
    client.close()


def files_of(answer):
    assert "value" in answer, answer
    folder = answer["value"]
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


def message_of(answer, kind="HubError"):
    assert answer.get("error") == kind, answer
    return answer["message"]


# ------------------------------------------------------------------------------------------ downloading


def test_only_files_that_a_model_needs_are_downloaded(hub, client):
    hub.add("org/plain")
    assert files_of(client("resolve", "org/plain")) == FILES


def test_a_branch_a_tag_and_a_commit_are_found(hub, client):
    main = hub.add("org/versions", {**FILES, "tokenizer.json": b"main"})
    hub.add("org/versions", {**FILES, "tokenizer.json": b"tag"}, "v1", "org/versions v1")
    hub.add("org/versions", {**FILES, "tokenizer.json": b"branch"}, "refs/pr/1", "org/versions pr")
    for revision, expected in ((None, b"main"), (main, b"main"), ("v1", b"tag"), ("refs/pr/1", b"branch")):
        answer = client("resolve", "org/versions", revision=revision)
        assert files_of(answer)["tokenizer.json"] == expected, revision


def test_headers_are_read_without_the_weights(hub, client, home):
    tensors = {"a.weight": {"dtype": "BF16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 41]}}
    header = json.dumps(tensors).encode()
    file = len(header).to_bytes(8, "little") + header  # declares two terabytes of weights
    hub.add("org/huge", {**FILES, **UNWANTED, "model.safetensors": file})
    value = client("read_headers", "org/huge")["value"]
    assert ast.literal_eval(value) == (
        {"model_type": "llama"},
        {"a.weight": ("bfloat16", (1 << 20, 1 << 20))},
    )
    assert not list(home.glob("**/*org--huge*"))
    message = message_of(client("read_headers", "org/missing"))
    assert "cannot read org/missing: there is no such repository" in message
    hub.add("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "no safetensors" in message_of(client("read_headers", "org/pickles"), "CheckpointError")


def test_the_token_reaches_the_hub(hub, client):
    hub.add("org/token")
    files_of(client("resolve", "org/token", token="hf_secret"))
    assert "Bearer hf_secret" in hub.authorization


def test_a_connection_that_drops_in_mid_file_is_resumed(hub, client):
    data = os.urandom(1 << 20) * 12 + b"end"  # the client saves its progress in steps of 10 MB
    hub.add("org/dropped", {**FILES, "model.safetensors": data})
    hub.drop_once["model.safetensors"] = 11 << 20
    assert files_of(client("resolve", "org/dropped"))["model.safetensors"] == data
    assert "model.safetensors" not in hub.drop_once
    assert any(not wanted.startswith("bytes=0-") for wanted in hub.ranges)


def test_cached_repositories_need_no_network(hub, client, home):
    hub.add("org/cached")
    online = client("resolve", "org/cached")
    assert client("resolve", "org/cached", local_files_only=True) == online
    offline = Client("http://127.0.0.1:9", home, HF_HUB_OFFLINE="1")
    assert offline("resolve", "org/cached") == online
    message = message_of(offline("resolve", "org/never_seen"))
    offline.close()
    assert "cannot download org/never_seen: it is not completely in the cache" in message
    assert "offline mode" in message
    assert message.count("Nor is there a folder of this name") == 1


def test_uncached_repositories_are_an_error_without_network(hub, client):
    hub.add("org/not_cached")
    message = message_of(client("resolve", "org/not_cached", local_files_only=True))
    assert "org/not_cached: it is not completely in the cache" in message


def test_a_given_cache_folder_is_used(hub, client, tmp_path):
    hub.add("org/elsewhere")
    answer = client("resolve", "org/elsewhere", cache_dir=str(tmp_path))
    assert files_of(answer) == FILES
    assert answer["value"].startswith(str(tmp_path))


def test_a_gated_repository_says_to_accept_its_licence_and_log_in(hub, client):
    hub.add("org/gated")
    hub.gated.add("org/gated")
    message = message_of(client("resolve", "org/gated"))
    assert "cannot download org/gated: the repository is gated: accept its licence" in message
    assert "hf auth login" in message


def test_a_missing_repository_says_to_check_the_name(client):
    message = message_of(client("resolve", "org/nothing_here"))
    assert "cannot download org/nothing_here: there is no such repository, or it is private" in message
    assert "Nor is there a folder of this name" in message  # a mistyped path has a slash, too


def test_a_missing_revision_is_named(hub, client):
    hub.add("org/plain2")
    message = message_of(client("resolve", "org/plain2", revision="v9"))
    assert "org/plain2 at revision 'v9': the repository has no such branch, tag or commit" in message


def test_a_failure_of_the_hub_is_reported_as_such(hub, client):
    hub.add("org/broken")
    hub.broken["/api/models/org/broken"] = 501  # a status that the client does not retry for half a minute
    message = message_of(client("resolve", "org/broken"))
    assert "cannot download org/broken: " in message
    assert "501" in message


def test_a_full_disk_is_reported_as_such(monkeypatch):
    import huggingface_hub

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(Exception, match="cannot download org/big: the disk of the cache is full") as error:
        resolve("org/big")
    assert type(error.value).__name__ == "HubError"


def test_an_invalid_repository_name_is_refused(client):
    assert "this is not the name of a repository" in message_of(client("resolve", "org/has spaces"))


def test_a_repository_with_pickles_only_says_to_convert(hub, client):
    hub.add("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    message = message_of(client("resolve", "org/pickles"), "CheckpointError")
    assert "org/pickles: the repository has no safetensors weights" in message
    assert "save_pretrained" in message


def test_a_repository_without_config_is_refused(hub, client):
    hub.add("org/weights", {"model.safetensors": b"x"})
    assert "org/weights: the repository has no config.json" in message_of(
        client("resolve", "org/weights"), "CheckpointError"
    )


# ------------------------------------------------------------------------------------------ local folders


def test_a_local_folder_is_used_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve(tmp_path.name).samefile(tmp_path)


def test_a_missing_folder_in_an_existing_one_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="runs/gone: is not a folder"):
        resolve("runs/gone")


@pytest.mark.parametrize("name", ["./gone", "../gone", "/gone/gone", "gone/a/b", "~/gone"])
def test_a_path_to_nothing_is_not_looked_up_on_the_hub(name):
    with pytest.raises(CheckpointError, match=r"gone.*is not a folder"):
        resolve(name)


@pytest.mark.parametrize("with_model", [True, False])
def test_a_folder_with_an_adapter_is_refused_as_a_model(tmp_path, with_model):
    """Other libraries load the model that the adapter names, and apply the adapter."""
    (tmp_path / "adapter_config.json").write_text("{}")
    if with_model:
        (tmp_path / "config.json").write_text("{}")
    message = "and a model; remove adapter_config.json to" if with_model else "but no model; to merge it into"
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: holds a PEFT adapter.*{message}"):
        resolve(tmp_path)


def test_the_folder_of_a_run_is_its_latest_checkpoint(tmp_path):
    for number, name in enumerate(("checkpoint-9", "checkpoint-10", "final")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (number, number))
        assert resolve(tmp_path) == tmp_path / name
    os.utime(tmp_path / "checkpoint-10" / "config.json", (5, 5))  # a longer run that was stopped
    assert resolve(str(tmp_path)) == tmp_path / "checkpoint-10"


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: has no config.json"):
        resolve(tmp_path)


# -------------------------------------------------------------------------------------------- uploading


@pytest.mark.parametrize("revision", [None, "draft"])
def test_a_folder_is_pushed_and_comes_back(hub, client, tmp_path, revision):
    """In the second case, the repository exists."""
    repo, branch = "org/pushed", revision or "main"
    files = {**FILES, "tokenizer.json": branch.encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    answer = client("push", str(tmp_path), repo, revision=revision, token="hf_writer", commit_message="Mine")
    commit = commit_id(f"{repo}{branch}Mine")
    assert hub.repos[repo]["refs"][branch] == commit
    assert answer == {"value": f"{hub.endpoint}/{repo}/commit/{commit}"}
    assert files_of(client("resolve", repo, revision=revision)) == files
    assert "Bearer hf_writer" in hub.authorization


def test_a_push_that_is_not_allowed_says_so(client, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = message_of(client("push", str(tmp_path), "forbidden/repo", token="hf_reader"))
    assert "cannot upload forbidden/repo: the hub refused (HTTP 403): check that your token" in message


def test_only_subfolders_with_chat_templates_and_modules_are_requested():
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "config.json",
        "model.safetensors",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ]
    others = ["onnx/config.json", "original/model.safetensors", "a/tokenizer.model", "a/b.txt", "a/b/c.jinja"]
    others += ["4bit/model.safetensors", "2_Dense/pytorch_model.bin"]
    patterns = {"allow_patterns": ALLOW_PATTERNS, "ignore_patterns": IGNORE_PATTERNS}
    assert list(filter_repo_objects([*wanted, *others, "consolidated.safetensors"], **patterns)) == wanted
