"""Other platforms, imitated: a system without locks of files, GPUs without bfloat16, AMD's GPUs, MPS."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_mps import fake_mps

from liger_models.convert import host
from liger_models.convert.checkpoints.atomic import atomic_folder
from liger_models.convert.errors import ConfigError
from liger_models.kernels import _dispatch, _gpu
from liger_models.layers.attention import backends, flash, fused, varlen
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec
from liger_models.models import devices
from liger_models.optim.adamw import AdamW
from liger_models.training.checkpoints.run_folder import locked

WINDOWS = """
import builtins, importlib, os, pkgutil, sys
from pathlib import Path
real = builtins.__import__
def without_unix(name, globals=None, *rest, **options):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("liger_models"):
        raise ImportError(name)
    return real(name, globals, *rest, **options)
builtins.__import__ = without_unix
import transformers  # reads what the system has
for name in ("sched_getaffinity", "O_DIRECTORY", "O_NONBLOCK"):
    delattr(os, name)
import liger_models
packages = {path.name for path in Path(liger_models.__path__[0]).iterdir()}  # not the repository's others
packages |= {path.stem for path in Path(liger_models.__path__[0]).glob("*.py")}
packages = packages - {"liger_models"} | {"kernels", "convert", "layers", "architectures"}
def import_all(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name.split(".")[1] in packages and not module.name.endswith("__main__"):
            try:
                imported = importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name.split(".")[0] not in ("verl", "torchtitan"):  # not in every environment
                    raise
                continue
            if module.ispkg:
                import_all(imported)
import_all(liger_models)
from liger_models.convert import host
host.OPENS_FOLDERS = False
model = liger_models.from_config(liger_models.preset("llama-demo"), device="cpu")
for _ in range(2):
    model.save_pretrained(sys.argv[1])
same = liger_models.from_hub(sys.argv[1], device="cpu").state_dict()
assert all(same[name].equal(tensor) for name, tensor in model.state_dict().items())
print(host.cores())
"""

TRAINED = """
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from liger_models.cli import main
from liger_models.training import TrainConfig, train
folder = Path(sys.argv[1]).parent
letters = pre_tokenizers.ByteLevel.alphabet()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
trainer = trainers.BpeTrainer(initial_alphabet=letters, special_tokens=["<s>", "</s>"])
tokenizer.train_from_iterator(["words"], trainer)
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
(folder / "data.jsonl").write_text('{"text": "some words"}\\n' * 20)
options = {"steps": 2, "warmup": 1, "seq_len": 32, "batch_size": 1, "save_every": 1, "device": "cpu"}
options |= {"tokenizer": str(folder)}
train(TrainConfig("llama-demo", (str(folder / "data.jsonl"),), str(folder / "run"), **options))
liger_models.from_hub(folder / "run" / "final", device="cpu")
assert main(["verify", str(folder / "run" / "final")]) == 0
print(host.cores())
"""


def test_everything_imports_and_checkpoints_are_written_without_unix_modules(tmp_path, request):
    """At night a model is trained there, exported and verified, too."""
    pytest.importorskip("transformers")
    program = WINDOWS + TRAINED * request.config.getoption("--all-families")
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0


def test_folders_are_replaced_and_runs_start_where_nothing_can_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "fcntl", None)
    monkeypatch.setattr(host, "OPENS_FOLDERS", False)
    for text in "first", "second":
        with atomic_folder(tmp_path / "out") as new:
            (new / "file").write_text(text)
    assert (tmp_path / "out" / "file").read_text() == "second"
    with locked(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_a_gpu_without_bfloat16_is_refused_or_runs_the_plain_forms(monkeypatch):
    """A T4: compute capability 7.5."""
    monkeypatch.setattr(devices, "parse_device", torch.device)
    monkeypatch.setattr(devices, "has_matrix_units", lambda index: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"in bfloat16, which Tesla T4 does not support .*dtype='float32'"):
        devices.device_for(torch.bfloat16, "cuda:0")
    with pytest.warns(UserWarning, match="Tesla T4 is older"):
        assert devices.device_for(torch.float32, "cuda:0") == torch.device("cuda:0")


def test_such_a_gpu_attends_with_a_key_head_for_each_query_head(monkeypatch):
    """torch's fused attention takes grouped heads from Ampere on, and elsewhere would keep all scores."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(fused, "unmasked_attention", lambda q, k, v, *_: seen.append([*k.shape, *v.shape]))
    q = torch.zeros(1, 8, 4, 16, dtype=torch.float16)
    for matrix_units in (False, True):
        monkeypatch.setattr(fused, "has_matrix_units", lambda device, answer=matrix_units: answer)
        fused.grouped_attention(q, q[:, :2], q[:, :2], AttentionSpec(8, 2, 16, 0.25), None)
    assert seen == [[1, 8, 4, 16] * 2, [1, 2, 4, 16] * 2]


def test_a_broken_triton_is_an_error_and_no_reason_to_run_slowly(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "triton.language.extra.cuda", None)
    spec = importlib.util.spec_from_file_location("dispatch_once_more", _dispatch.__file__)
    with pytest.raises(ImportError, match=r"triton\.language\.extra\.cuda"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("arch", "rocm", "described", "family", "matrix_units", "most_warps"),
    [
        # As torch for ROCm describes an MI250X and an RX 7900: without a property that CUDA's torch has, and
        # with capabilities that NVIDIA gave to other architectures.
        ("gfx90a", "7.0", {"major": 9, "minor": 0, "warp_size": 64}, "cdna", True, 16),
        ("gfx1100", "7.0", {"major": 11, "minor": 0, "warp_size": 32}, "rdna", True, 32),
        ("sm_75", None, {"major": 7, "minor": 5, "warp_size": 32}, "desktop", False, 32),
    ],
)
def test_a_gpu_is_known_by_its_architecture(
    arch, rocm, described, family, matrix_units, most_warps, monkeypatch
):
    properties = SimpleNamespace(
        gcnArchName=f"{arch}:sramecc+:xnack-",
        shared_memory_per_block=65536,
        multi_processor_count=104,
        **described,
    )
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = _gpu.gpu.__wrapped__(0)
    assert (found.arch, found.amd, found.family) == (arch, rocm is not None, family)
    assert (found.matrix_units, found.most_warps) == (matrix_units, most_warps)
    assert (found.shared_memory, found.multiprocessors) == (65536, 104)
    assert not found.starts_early


def test_an_mi250_which_has_hoppers_capability_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx90a:xnack-")
    )
    assert flash._device(SimpleNamespace(is_cuda=True, device=0)) != "sm_90"


@pytest.mark.parametrize(("has", "chosen"), [(True, "varlen"), (False, "masked")])
def test_packed_documents_attend_on_rocm_by_what_torch_has_there(has, chosen, monkeypatch):
    """Under torch.compile, where our own kernel does not run."""
    asked = []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(backends, "has_matrix_units", lambda device: True)
    monkeypatch.setattr(backends, "use_triton", lambda q: False)
    monkeypatch.setattr(varlen, "_runs_on", lambda index: asked.append(index) or has)
    q = torch.zeros(7, 2, 16, dtype=torch.bfloat16)
    visibility = Sequences.of_lengths([3, 4], q.device).visibility
    assert backends._choose(q, q, q, AttentionSpec(2, 2, 16, 0.25), visibility) == chosen
    assert asked == [q.device.index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_gives_parameters_on_mps_a_cpus_bits_without_float64_there(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(37, 5, generator=generator).to(dtype) for _ in range(4))

    def steps(weight):
        weight = torch.nn.Parameter(weight)
        optimizer, norms = AdamW([weight], lr=0.1), []
        for gradient in gradients:
            weight.grad = gradient.to(weight.device)
            norms.append(optimizer.clip_grad_norm(1.0))
            optimizer.step()
        state = optimizer.state[weight]
        assert {x.device for x in (*state.values(), *norms)} == {weight.device}
        return [x.detach().cpu() for x in (weight, *state.values(), *norms)]

    expected = steps(weight.clone())
    with fake_mps(any_operation=True):
        found = steps(weight.to("mps"))
    assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_on_mps_is_that_of_a_cpu_without_torchs_kernels_there(dtype, monkeypatch):
    monkeypatch.delattr(fused.F, "scaled_dot_product_attention")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 7, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    expected = fused.torch._scaled_dot_product_attention_math(
        *(x.double() for x in (q, k, v)), is_causal=True, scale=0.25, enable_gqa=True
    )[0]
    with fake_mps(any_operation=True):
        found = fused.unmasked_attention(*(x.to("mps") for x in (q, k, v)), 0.25, causal=True).cpu()
    # Probabilities and the result are rounded, each by half a unit.
    assert (found - expected).abs().max() <= 3 * torch.finfo(dtype).eps * v.abs().max()
