"""Fixtures that pair our transformers models with transformers' own, with the same random parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Fork
from registering import search_after_imports_only
from torch import Tensor

from liger_models.architectures import find_architecture

# For hf_pairs, in the same folder, and for representatives.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "architectures")]

from hf_pairs import Both
from pairs import reference_class, scan_short_chunks, skip_groups_normalised_together
from representatives import leave_layers_to, representatives


@pytest.hookimpl(tryfirst=True)  # before night/ leaves out some of the cases of these families
def pytest_collection_modifyitems(config, items):
    leave_layers_to(representatives, config, items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def own_choices() -> Iterator[None]:
    """Reset the settings that accelerate and Trainer keep in the environment and in globals."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]


@pytest.fixture(autouse=True)
def no_model_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save adapters without PEFT's model cards, which take most of the time."""
    if "peft" in sys.modules:
        monkeypatch.setattr(sys.modules["peft"].PeftModel, "create_or_update_model_card", lambda *_: None)


@pytest.fixture
def hf() -> Iterator[Any]:
    """Provide liger_models.hf, and restore the Auto classes after the test."""
    pytest.importorskip("transformers")
    import liger_models.hf

    search_after_imports_only()
    yield liger_models.hf
    liger_models.hf.unregister()


@pytest.fixture
def make_both(hf, tmp_path) -> Callable[..., Both]:
    """Factory: `make_both("llama", task="CausalLM", projections="fused", attention_bias=False)`
    uses the family's tiny config with changes. Without `load`, the caller loads our model.
    """
    import transformers

    def make(
        family: str, task: str = "CausalLM", projections: str = "fused", load: bool = True, **changes: Any
    ) -> Both:
        hf.unregister()
        auto = theirs = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
        if task == "CausalLM":  # by name: the Auto class does not know every family
            theirs = reference_class(find_architecture(family))  # or skip
        tiny = {"pad_token_id": None, **find_architecture(family).tiny, **changes}
        config = transformers.AutoConfig.for_model(**tiny)
        # Its other implementations of attention ignore softcap in some versions.
        scan_short_chunks(config)
        make_theirs = theirs.from_config if theirs is auto else theirs._from_config
        reference = make_theirs(config, attn_implementation="eager")
        skip_groups_normalised_together(reference, config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                if name.endswith("A_log"):  # most initial decays are so fast that their gradients cancel
                    p.fill_(-1.0)
                p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else p + 0.3 * noise)
        reference.eval().save_pretrained(tmp_path / "theirs")
        hf.register(projections)
        if not load:
            return Both(reference, tmp_path / "theirs", None)
        ours = auto.from_pretrained(tmp_path / "theirs").eval()
        assert isinstance(ours, hf.LigerModel | hf.LigerForCausalLM | hf.LigerForSequenceClassification)
        return Both(reference, tmp_path / "theirs", ours)

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two documents, the first padded on the right, with labels on most tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 131, (2, 13), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def four_rows() -> dict[str, Tensor]:
    """Four rows for two ranks with different label counts."""
    ids = torch.randint(3, 131, (4, 13), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[2:, :8] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def run_ranks() -> Callable[..., list[dict[str, Any]]]:
    """Factory: `run_ranks(folder, cases, batch)` runs sharded_rank.py twice and returns results."""

    def run(
        folder: Path, cases: Any, batch: Any, device: str = "cpu", ranks: int = 2, **environment: str
    ) -> list[dict[str, Any]]:
        torch.save({"cases": cases, "batch": batch}, folder / "task.pt")
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        script = Path(__file__).with_name("sharded_rank.py")
        environment |= {"GLOO_SOCKET_IFNAME": "lo"}
        own = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
        if device == "cpu" and "DS_ACCELERATOR" not in environment:  # without torchrun, which imports again
            imports = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import sharded_rank"
            code = "import pathlib, sharded_rank, sys; sharded_rank.main(pathlib.Path(sys.argv[1]), 'cpu')"
            given = [imports, code, ranks, str(folder)]
            fork = Fork("launch", *given, output=folder / "output", environment={**own, **environment})
            ended = fork.wait(500)
            assert ended == 0, f"{ended}: {fork.output.read_text()[-9000:]}"
            return [torch.load(folder / f"results{rank}.pt") for rank in range(ranks)]
        done = subprocess.run(
            [sys.executable, "-m", *launch, str(script), str(folder), device],
            env={**own, **environment},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[:9000]
        return [torch.load(folder / f"results{rank}.pt") for rank in range(ranks)]

    return run
