"""Checks of the whole package: import layers, import cost, contents and forbidden content."""

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import liger_models

ROOT = Path(__file__).parents[1]

# Which of the package's parts each part may import, besides itself.
MAY_IMPORT = {
    "kernels": set(),
    "convert": set(),
    "layers": {"kernels", "convert"},
    "architectures": {"layers", "convert"},
    "liger_models": {"kernels", "convert", "layers", "architectures"},
}
# What `pip install liger_models` brings; anything else is imported inside the function that needs it.
HARD_DEPENDENCIES = {"torch", "triton", "safetensors", "huggingface_hub", "tokenizers", "tqdm"}
# Modules that are made of another library's classes, and that library: nothing else imports them.
BUILT_ON = {
    "liger_models.hf": "transformers",
    "liger_models.hf.adapters.expert_adapters": "peft",
    "liger_models.hf.adapters.expert_lora": "peft",
    "liger_models.hf.adapters.kept_bits": "peft",
    "liger_models.hf.adapters.lora": "peft",
    "liger_models.integrations.torchtitan": "torchtitan",
    "liger_models.integrations.verl": "verl",
    "liger_models.integrations.verl_checkpoints": "verl",
    "liger_models.integrations.verl_settings": "verl",
    "liger_models.integrations.verl_shards": "verl",
    "liger_models.training.text.template_classes": "jinja2",
}
# But these, in the function in which a user has asked for that library.
ON_REQUEST = {
    "liger_models.models.causal_lm",
    "liger_models.models.streaming",
    "liger_models.training.lora",
    "liger_models.training.adapters.lora_targets",
    "liger_models.training.text.template_program",
}


def sources(part):
    return sorted((ROOT / part).rglob("*.py"))


def installed(path):
    """Return the installed path of a file: kernels/norms/rms_norm.py is liger_models/kernels/rms_norm.py."""
    path = path.relative_to(ROOT)
    return path if path.parts[0] in ("liger_models", "benchmarks") else "liger_models" / path


def module_name(path):
    return ".".join(installed(path).with_suffix("").parts).removesuffix(".__init__")


def built_on(name):
    """Return the library that a module is built on, or None; packages themselves can always be imported."""
    while name and name not in BUILT_ON:
        name = name.rpartition(".")[0]
    return BUILT_ON.get(name)


def is_importable(name):
    library = built_on(name)
    return library is None or importlib.util.find_spec(library) is not None


ALL_MODULES = sorted(module_name(path) for part in MAY_IMPORT for path in sources(part))


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


@functools.cache
def imported(path, top=False):
    """Return the full names of the modules that a file imports: at its `top`, or anywhere."""
    nodes = tree(path).body if top else statements(tree(path))
    return list(names_imported(path, nodes))


def statements(node):
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def names_imported(path, nodes):
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            # `from liger_models import convert` names a module in the alias.
            yield from (f"{source}.{alias.name}" for alias in node.names)


def part_of(name):
    """Return the part of a module, or None for third-party modules."""
    first, *rest = name.split(".")
    if first != "liger_models":
        return None
    return rest[0] if rest and rest[0] in MAY_IMPORT else "liger_models"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_never_point_up(part):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(part)
        for name in imported(path)
        if part_of(name) not in {None, part} | MAY_IMPORT[part]
    ]
    assert not wrong, wrong


def test_the_code_folders_are_never_imported_by_their_bare_names():
    bare = re.compile(rf"^\s*(from|import)\s.*\b({'|'.join(MAY_IMPORT.keys() - {'liger_models'})})\b", re.M)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part in [*MAY_IMPORT, "tests", "examples", "benchmarks"]
        for path in sources(part)
        if bare.search(re.sub(r"liger_models(\.\w+)+", "", path.read_text()))  # parsing all takes seconds
        for name in imported(path)
        if name.split(".")[0] in MAY_IMPORT.keys() - {"liger_models"}
    ]
    assert not wrong, wrong


def test_modules_import_only_hard_dependencies_at_their_top():
    wrong = []
    for part in MAY_IMPORT:
        for path in sources(part):
            for name in imported(path, top=True):
                first = name.split(".")[0]
                allowed = HARD_DEPENDENCIES | {"liger_models", built_on(module_name(path))}
                if first not in sys.stdlib_module_names | allowed:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_what_is_made_of_another_librarys_classes_is_imported_by_nothing_else():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part in MAY_IMPORT
        for path in sources(part)
        for name in imported(path)
        if any(name.startswith(f"{package}.") for package in BUILT_ON)
        and not module_name(path).startswith(tuple(BUILT_ON))
        and module_name(path) not in ON_REQUEST
    ]
    assert not wrong, wrong


def imports_between(files):
    """Map every module in `files` to the others that it imports, at the top, in functions or for types."""
    graph = {}
    for name, path in files.items():
        graph[name] = set()
        for wanted in imported(path):
            while wanted and wanted not in files:  # a class or function of a module, or somebody else's
                wanted = wanted.rpartition(".")[0]
            graph[name] |= {wanted} - {"", name}
    return graph


@pytest.mark.parametrize("parts", [[*MAY_IMPORT], ["benchmarks"]], ids=["package", "benchmarks"])
def test_no_module_imports_another_that_imports_it(parts):
    files = {module_name(path): path for part in parts for path in sources(part)}
    graph = imports_between(files)
    assert sum(map(len, graph.values())) > len(graph)
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


def folder_of(name, path):
    """Return the folder of a module. A package's `__init__` is a separate node above its modules."""
    return f"{name}.__init__" if path.name == "__init__.py" else name.rpartition(".")[0]


def test_no_folder_imports_another_that_imports_it():
    files = {module_name(path): path for part in MAY_IMPORT for path in sources(part)}
    graph = {}
    for name, wanted in imports_between(files).items():
        folder = folder_of(name, files[name])
        graph.setdefault(folder, set()).update({folder_of(w, files[w]) for w in wanted} - {folder})
    assert len(graph) > 40
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_every_folder_says_in_at_most_three_lines_what_lives_there(part):
    docs = {path: ast.get_docstring(tree(path)) for path in sources(part) if path.name == "__init__.py"}
    lines = {path: len([line for line in (doc or "").splitlines() if line]) for path, doc in docs.items()}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if not 1 <= n <= 3} == {}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_every_folder_says_what_may_be_imported_there(part):
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(part)
        if path.name == "__init__.py"
        and path.parent != ROOT / "liger_models"  # which offers names of all the others
        and not re.search(r"\b[Ii]mports?\b", ast.get_docstring(tree(path)) or "")
    ]
    assert not silent, silent


@pytest.mark.parametrize("part", sorted(MAY_IMPORT.keys() - {"kernels"}))
def test_no_file_is_longer_than_400_lines(part):
    """A kernel and its twin stay together; any other file of that length holds two ideas."""
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(part)}
    assert {name: count for name, count in lengths.items() if count > 400} == {}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_no_folder_holds_more_than_twenty_modules(part):
    """Beyond that it needs subfolders. `architectures` has one file a family."""
    counts = Counter(path.parent for path in sources(part) if path.parent.name != "architectures")
    assert {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > 20} == {}


def test_every_folder_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        module_name(path) for part in MAY_IMPORT for path in sources(part) if path.name == "__init__.py"
    }
    assert set(listed) == folders


def test_modules_are_changed_in_place_in_one_file():
    """Where a debugger can stop at it."""
    home = ROOT / "layers" / "projections" / "in_place.py"
    pattern = re.compile(r"\.__class__ = |\._modules\b(?!\.(items|values)\(\))")
    files = [path for part in MAY_IMPORT for path in sources(part) if pattern.search(path.read_text())]
    assert files == [home]


def test_torchs_attention_is_called_in_one_file():
    """Which kernels are right on a device is decided there."""
    home = ROOT / "layers" / "attention" / "fused.py"
    files = [
        path
        for part in MAY_IMPORT
        for path in sources(part)
        if "F.scaled_dot_product_attention(" in path.read_text()
    ]
    assert files == [home]


def run_python(code, cwd, **env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Results of imports in a fresh process, which imports torch once, started from the root of a second
    checkout.
    """
    folder = tmp_path_factory.mktemp("checkout")
    for part in MAY_IMPORT:
        (folder / part).symlink_to(ROOT / part)
    done = run_python(
        f"""
        import importlib.util, json, os, sys, torch

        def tell(name, found):
            with open(name + ".json", "w") as file:
                json.dump(found, file)

        if (child := os.fork()) == 0:
            before = set(sys.modules)
            import liger_models
            liger_models.from_hub, liger_models.LigerCausalLM
            tell("loaded", sorted(set(sys.modules) - before))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        import liger_models
        named = [liger_models.losses.__name__, liger_models.images.Preprocessor.__name__]
        tell("named", [*named, liger_models.models.MedusaModel.__name__])
        if importlib.util.find_spec("peft"):
            assert all(getattr(liger_models.hf, name) for name in liger_models.hf.__all__)
        for name in {list(filter(is_importable, ALL_MODULES))}:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "liger_models"]
        tell("files", [module.__file__ for module in ours])
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr
    return folder, {
        name: json.loads((folder / f"{name}.json").read_text()) for name in ("loaded", "named", "files")
    }


def test_importing_loads_nothing_beyond_torch_and_triton(fresh):
    """The cost of an import is the modules it loads: a clock would measure the machine's load and disk."""
    loaded = set(fresh[1]["loaded"])
    packages = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert {name for name in packages if not name.startswith("_sysconfigdata")} == {"liger_models", "triton"}
    assert not {"torch._dynamo", "torch._inductor"} & loaded  # the compiler


def test_help_and_list_do_not_wait_for_torch(tmp_path):
    done = run_python(
        """
        import sys
        from liger_models.cli import build_parser, main
        build_parser().format_help()
        main(["list"])
        print("torch" in sys.modules)
        """,
        tmp_path,
    )
    assert "qwen3" in done.stdout
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_the_package_offers_what_it_lists():
    assert {name for name in liger_models.__all__ if not hasattr(liger_models, name)} == set()
    assert set(liger_models.__all__) <= set(dir(liger_models))
    with pytest.raises(AttributeError, match="no attribute 'from_the_hub'"):
        _ = liger_models.from_the_hub


def test_packages_that_the_docs_name_are_attributes(fresh):
    assert fresh[1]["named"] == ["liger_models.losses", "Preprocessor", "MedusaModel"]


def test_every_module_imports_without_triton_and_the_extras(tmp_path):
    done = run_python(
        f"""
        import importlib, sys
        for absent in ("triton", "transformers", "matplotlib", "jinja2", "numpy", "liger_kernel", "psutil"):
            sys.modules[absent] = None
        import liger_models.cli
        liger_models.cli.main(["inspect", "llama-demo"])  # imports torch, which would warn of numpy
        for name in {[name for name in ALL_MODULES if not built_on(name)]}:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        """,
        tmp_path,
        TRITON_INTERPRET="0",
    )
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr


def test_a_checkout_imports_no_part_of_another(fresh):
    """Started from the root of a second checkout, Python finds that one first: and then all of it."""
    folder, found = fresh
    assert [file for file in found["files"] if not file.startswith(str(folder))] == []
    assert len(found["files"]) == len(list(filter(is_importable, ALL_MODULES))) - 1


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist and, from it, the wheel of a copy of the tree."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    out = tree.parent / "dist"
    keep_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "demo-output")
    shutil.copytree(ROOT, tree, ignore=keep_out)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_wheel_holds_every_module_the_licence_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
        (licence,) = [name for name in names if name.endswith("/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    code = {name for name in names if ".dist-info/" not in name}
    files = {str(installed(path)) for part in MAY_IMPORT for path in sources(part)}
    assert code == files | {"liger_models/py.typed"}


@pytest.mark.slow
def test_an_installed_wheel_is_found_and_runs_outside_the_repository(built, tmp_path):
    """Without torch, whose import takes seconds; `make package` trains with the wheel."""
    target = tmp_path / "installed"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            target,
            built[1],
        ],
        check=True,
        timeout=120,
    )
    done = run_python(
        f"""
        import importlib.util, sys
        sys.path.insert(0, {str(target)!r})
        sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
        for name in {list(MAY_IMPORT)}:
            name = name if name == "liger_models" else "liger_models." + name
            origin = importlib.util.find_spec(name).origin
            assert origin.startswith({str(target)!r}), origin
        from liger_models.cli import main
        main(["list"])
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_sdist_holds_what_a_build_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    code = {str(path.relative_to(ROOT)) for part in MAY_IMPORT for path in sources(part)}
    assert {"LICENSE", "README.md", "pyproject.toml", "liger_models/py.typed"} | code <= names


def test_no_path_or_registry_of_one_machine_is_written_down():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = [f"/{top}/" for top in ("work", "home", "root", "Users", "opt")]
    parts = [*tops, "file:" + "//", "py" + "pi"]
    patterns = [rf"(?<![\w.~]){top}\w" for top in tops] + ["file:" + "//", r"https?://\S*py" + r"pi\b"]
    wrong, either = [], re.compile("|".join(patterns))
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png"} or not path.exists():
            continue
        text = path.read_text()
        lines = text.splitlines() if any(part in text for part in parts) else []
        wrong += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if either.search(line)]
    assert not wrong, wrong
