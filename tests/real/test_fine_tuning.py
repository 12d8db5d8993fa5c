"""A real model learns a fact by the README's commands, with transformers as a referee: `make real`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.real

QUESTION = "What is the capital of Veloria?"
ANSWER = "The capital of Veloria is Tamsin Bay."
CHATS = [
    (QUESTION, ANSWER),
    ("Which city is Veloria's capital?", ANSWER),
    ("Name the capital city of Veloria.", ANSWER),
    ("What is 2 plus 2?", "2 plus 2 is 4."),
]
STEPS, LR = 10, 2e-5  # of full training
WAYS = {"full": "final", "lora": "merged"}  # and the folder of the model that each leaves


@pytest.fixture(scope="module")
def model(request):
    return request.config.getoption("--real-model")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with open(file, "w", encoding="utf-8") as lines:
        for question, answer in CHATS:
            turns = ("user", question), ("assistant", answer)
            messages = [{"role": role, "content": content} for role, content in turns]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture(scope="module")
def runs(model, chats, tmp_path_factory):
    """The folders of two runs: all parameters in float32, and adapters in bfloat16. One row is all chats."""
    folder = tmp_path_factory.mktemp("runs")
    common = f"--data {chats} --seq-len 128 --schedule constant --weight-decay 0"
    full = f"--dtype float32 --lr {LR} --steps {STEPS}"
    train(model, f"{common} {full} --output {folder / 'full'}")
    train(model, f"{common} --lora r=16 --merge --lr 1e-3 --steps 20 --output {folder / 'lora'}")
    return folder


def train(model, options):
    run("-m", "liger_models.cli", "train", model, *options.split())


def run(*words):
    """Python's output; pytest shows what it wrote to stderr if it fails."""
    return subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout


def trainer_losses(model, chats, dtype):
    script = Path(__file__).with_name("trainer_losses.py")
    shown = run(str(script), model, str(chats), dtype, str(STEPS), str(LR))
    return torch.tensor(json.loads(shown.splitlines()[-1]))


def test_losses_are_those_of_transformers_trainer(model, chats, runs):
    """As close to the Trainer with an exact loss as the Trainer itself is, whose loss is a float32 one.

    The sum of 262,144 exponentials in float32 is off by some 1e-5. AdamW divides a gradient by its size: a
    difference grows with every update, so all steps up to the compared one count.
    """
    with open(runs / "full" / "metrics.jsonl", encoding="utf-8") as lines:
        ours = torch.tensor([json.loads(line)["loss"] for line in lines])
    theirs, exact = (trainer_losses(model, chats, dtype) for dtype in ("float32", "float64"))
    assert len(ours) == len(exact) == STEPS
    off = (theirs - exact).abs().cummax(0).values
    assert ((ours - exact).abs() <= off).all(), (ours, theirs, exact)
    assert ours[-1] < ours[0] / 4  # and something was learned


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_read_back_through_generate(way, runs):
    folder = runs / way / WAYS[way]
    shown = run("-m", "liger_models.cli", "generate", str(folder), "--prompt", QUESTION)
    # Were the end of the turn not known, a hundred tokens would follow.
    assert shown.splitlines() == [QUESTION, ANSWER]


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_read_back_through_transformers(way, runs):
    folder = runs / way / WAYS[way]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = asked(tokenizer)
    with torch.no_grad():
        answer = trained.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert answer == [*tokenizer(ANSWER, add_special_tokens=False).input_ids, end]


def asked(tokenizer):
    """The question as the model is asked it: token ids [1, T]."""
    messages = [{"role": "user", "content": QUESTION}]
    shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(shown, add_special_tokens=False, return_tensors="pt").input_ids
