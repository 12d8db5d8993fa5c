"""The common prefix of examples of one conversation is computed once, with the same results."""

import base64
import json
import os
import shutil
import signal

import drawn
import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError
from liger_models.layers.recompute import tiles
from liger_models.training import TrainingInterrupted, inputs, loop, train
from liger_models.training.data import IGNORE, Documents, Stream, build_corpus, load_documents
from liger_models.training.data.trees import Branch, trees_of
from liger_models.training.text.tokenizer import TextTokenizer

# Drops earlier reasoning, as many templates do: an example differs from later ones from its answer on.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(seed, turns):
    generator = torch.Generator().manual_seed(seed)

    def words(most):
        counts = torch.randint(
            1, 5, (int(torch.randint(1, most, (1,), generator=generator)),), generator=generator
        )
        return " ".join("ab" * int(count) for count in counts)

    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(6)})
        answer = {"role": "assistant", "content": words(4), "reasoning_content": words(4)}
        messages.append(answer)
    return {"messages": messages}


CHATS = [chat(seed, turns) for seed, turns in enumerate((3, 1, 4, 2))]


@pytest.fixture
def chats(tmp_path, jsonl):
    return jsonl(tmp_path / "chats.jsonl", CHATS)


@pytest.fixture
def model_of(tmp_path, tokenizer_folder):
    """Factory of folders with a family's tiny random model and a tokenizer with this template."""

    def make(family, **config):
        folder = tmp_path / family
        shape = find_architecture(family).tiny | {"vocab_size": 320} | config
        torch.manual_seed(3)
        model = liger_models.from_config(shape, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = 0.1 * torch.randn(parameter.shape)
                parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
        model.save_pretrained(folder)
        settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
        return folder

    return make


@pytest.fixture
def documents_of(model_of, chats):
    tokenizer = TextTokenizer(model_of("llama"))

    def make(share, seq_len=256, **options):
        given = {"seq_len": seq_len, "vocab_size": 320, "train_on": "each", "share": share} | options
        return load_documents([chats], tokenizer, **given)

    return make


def examples_of(documents, seq_len):
    """Ids with labels of every example of the first epoch, in any order."""
    found = []
    for row in Stream(documents, seq_len, 0).epoch(0):
        batch = documents.batch([row])
        ids, labels, bounds = batch.input_ids[0], batch.shift_labels[0], batch.cu_seqlens.tolist()
        parents = torch.zeros(2, len(bounds) - 1).long() - 1 if batch.parents is None else batch.parents
        for number, (parent, shared) in enumerate(parents.T.tolist()):
            own = slice(bounds[number], bounds[number + 1])
            before = slice(bounds[parent], bounds[parent] + shared) if parent >= 0 else slice(0, 0)
            learned = torch.cat([torch.full_like(labels[before], IGNORE), labels[own]]).tolist()
            both = torch.cat([ids[before], ids[own]]).tolist()
            last = max(n for n, label in enumerate(learned) if label != IGNORE)
            found.append((both[: last + 1], learned[: last + 1]))
    return sorted(found)


@pytest.mark.parametrize("seq_len", [256, 96])
def test_a_tree_holds_the_examples_with_their_labels_and_repeats_no_prompt(documents_of, seq_len):
    shared, apart = documents_of(True, seq_len), documents_of(False, seq_len)
    assert examples_of(shared, seq_len) == examples_of(apart, seq_len)
    assert len(examples_of(apart, seq_len)) == sum(len(chat["messages"]) // 2 for chat in CHATS)
    rows = [*Stream(shared, seq_len, 0).epoch(0)], [*Stream(apart, seq_len, 0).epoch(0)]
    counts = [documents.count(part) for documents, part in zip((shared, apart), rows, strict=True)]
    assert counts[0].labels == counts[1].labels
    # A branch begins with a copy of a token, and the last token before it is an input here.
    branches = shared.parts[0].corpus.branches
    spared = int((branches[:, 1] - 1).sum())
    assert counts[0].inputs == counts[1].inputs - spared < counts[1].inputs
    assert counts[0].inputs == sum(stop - start for row in rows[0] for start, stop in row)
    assert all(sum(stop - start for start, stop in row) <= seq_len for row in rows[0])
    # The longest example must fit, not the tree. Its last token is an input too if a branch follows it.
    assert shared.longest_piece(seq_len) - apart.longest_piece(seq_len) in (0, 1)
    assert shared.counts["tokens of shared prompts not repeated"] == int(branches[:, 1].sum())


def test_a_conversation_that_does_not_fit_in_a_row_becomes_several_trees(documents_of):
    whole, parts = documents_of(True, 256), documents_of(True, 96)
    assert len(whole) == len(CHATS) < len(parts)
    assert len(parts.parts[0].corpus.branches) > 0


def test_branches_that_share_the_most_come_first_and_learned_tokens_are_not_shared():
    trunk = Branch([1, 2, 3, 4, 5, 6], b"\0\0\0\0\0\1")
    short, long = Branch([1, 2, 3, 9], b"\0\0\0\1"), Branch([1, 2, 3, 4, 5, 9], b"\0\0\0\0\0\1")
    learns = Branch([1, 2, 3, 4, 5, 7], b"\0\0\0\1\1\1")
    (tree,) = trees_of([short, long, learns, trunk], 100)
    assert tree == [
        trunk,
        Branch([5, 9], b"\0\1", 4),
        Branch([3, 4, 5, 7], b"\0\1\1\1", 2),
        Branch([3, 9], b"\0\1", 2),
    ]
    assert trees_of([Branch([7, 2, 3], b"\0\0\1"), trunk], 100) == [[Branch([7, 2, 3], b"\0\0\1")], [trunk]]
    assert trees_of([short, long, trunk], 8) == [[short], [trunk, Branch([5, 9], b"\0\1", 4)]]


LEVELS = ("all", "checkpoint", "tiled")
CASES = [("llama", level) for level in LEVELS]
CASES += [("gemma3_text", "checkpoint"), ("gemma3_text", "tiled"), ("mixtral", "all"), ("mixtral", "tiled")]


@pytest.mark.parametrize(("family", "level"), CASES, ids=["-".join(case) for case in CASES])
def test_loss_and_every_gradient_equal_those_of_the_examples_one_by_one(
    family, level, model_of, chats, start, monkeypatch
):
    """Compare a step over all data, in one row each. Windows of gemma3_text are shorter than the prompts."""
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(loop.Run, "_update", lambda run, rate: None)  # keeps the gradients
    folder, found = model_of(family), []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(inputs, "can_share_prompts", lambda *_: False)
        options = {"seq_len": 1024, "gradient_accumulation": 1, "activation_memory": level}
        run = start(model=str(folder), data=(chats,), train_on="each", steps=1, eval_every=0, **options)
        outcome = run.step(1e-3, loop.Signals())
        assert run.stream.rows_of(0) == 1
        found.append(
            (outcome, {name: p.grad for name, p in run.model.named_parameters()}, run.progress.tokens)
        )
    (shared, grads, fewer), (apart, expected, more) = found
    assert fewer < more
    assert shared.data.counts.labels == apart.data.counts.labels
    assert shared.loss == pytest.approx(apart.loss, rel=1e-6)
    for name, grad in expected.items():  # about a hundred float32 roundings
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_images_shared_by_several_answers_are_computed_once(
    vision_model, tmp_path, jsonl, start, monkeypatch
):
    """Conversations may begin without an image, and be next to one without images."""
    pytest.importorskip("PIL.Image")
    turn = "<|im_start|>{{ m.role }}\n"
    thought = "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}"
    folder = tmp_path / "model"
    shutil.copytree(vision_model, folder)
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.jinja").write_text(drawn.TEMPLATE.replace(turn, turn + thought))

    def asks(*pictures):
        parts = [
            {"type": "image", "image": {"bytes": base64.b64encode(drawn.png(*one)).decode()}}
            for one in pictures
        ]
        return {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}

    def says(text, thought):
        return {"role": "assistant", "content": text, "reasoning_content": thought}

    one, other = ("red", (24, 24)), ("blue", (16, 40))
    chats = [
        [asks(one), says("red", "green"), asks(), says("blue", "red"), asks(other), says("green", "blue")],
        [asks(), says("red", "blue"), asks(other, one), says("blue", "green"), asks(), says("red", "red")],
        [asks(), says("blue", "green"), asks(), says("red", "green")],
    ]
    data, found = jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats]), []
    monkeypatch.setattr(loop.Run, "_update", lambda run, rate: None)
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(inputs, "can_share_prompts", lambda *_: False)
        options = {
            "seq_len": 1024,
            "gradient_accumulation": 1,
            "train_on": "each",
            "steps": 1,
            "eval_every": 0,
        }
        run = start(model=str(folder), data=(data,), **options)
        assert run.stream.rows_of(0) == 1
        outcome = run.step(1e-3, loop.Signals())
        found.append((outcome, {n: p.grad for n, p in run.model.named_parameters()}, run.documents))
    (shared, grads, trees), (apart, expected, examples) = found
    assert (len(trees), len(examples)) == (3, 8)
    assert (trees.counts["images"], examples.counts["images"]) == (2 + 2, 1 + 1 + 2 + 2 + 2)
    assert shared.data.counts.labels == apart.data.counts.labels
    assert shared.data.counts.inputs < apart.data.counts.inputs
    assert shared.loss == pytest.approx(apart.loss, rel=1e-6)
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-5 * max(grad.norm(), 1.0), name


def test_an_example_that_is_a_prefix_of_another_is_part_of_it():
    trunk, first = Branch([1, 2, 3, 4], b"\0\0\0\1"), Branch([1, 2], b"\0\1")
    assert trees_of([first, trunk], 9) == [[Branch([1, 2, 3, 4], b"\0\1\0\1")]]
    both = Branch([1, 2, 3, 4], b"\0\1\0\1")
    assert trees_of([first, both], 9) == [[first], [both]]  # a label that counts twice stays in both trees


def test_a_stopped_run_resumes_with_the_same_bits(model_of, chats, settings, losses, tmp_path, monkeypatch):
    """The run takes more than one epoch, with held-out conversations."""
    options = {"model": str(model_of("llama")), "data": (chats,), "train_on": "each", "seq_len": 96}
    whole = train(settings(output=tmp_path / "whole", **options))
    make, made = Documents.batch, []

    def batch(self, rows):
        made.append(rows)
        if len(made) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return make(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "batch", batch)
        with pytest.raises(TrainingInterrupted):
            train(settings(**options))
    resumed = train(settings(resume="auto", **options))
    assert losses(resumed) == losses(whole)
    for one, other in zip(
        *(sorted(run.final.glob("*.safetensors")) for run in (resumed, whole)), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("mixtral", {"output_router_logits": True}, {}),
        ("glm4_moe", {}, {}),
        ("llama", {}, {"attention": "varlen"}),
    ],
    ids=["a router's loss", "a correction bias", "a backend"],
)
def test_examples_are_separate_where_sharing_would_change_results(
    family, config, options, model_of, chats, start
):
    run = start(model=str(model_of(family, **config)), data=(chats,), train_on="each", seq_len=256, **options)
    assert len(run.documents) == sum(len(chat["messages"]) // 2 for chat in CHATS)


def test_a_corpus_of_trees_is_refused_where_prompts_cannot_be_shared(model_of, chats, tmp_path):
    tokenizer = TextTokenizer(model_of("llama"))
    given = {"seq_len": 256, "vocab_size": 320, "train_on": "each"}
    corpus = build_corpus(tmp_path / "corpus", [chats], tokenizer, share=True, **given)
    named = [str(corpus.folder)]
    with pytest.raises(DataError, match="pass the original data"):
        load_documents(named, tokenizer, **given)
    assert load_documents(named, tokenizer, share=True, verify=True, **given).counts == corpus.counts
    with pytest.raises(DataError, match="positions and seq_len is 64"):
        load_documents(named, tokenizer, share=True, **given | {"seq_len": 64})
