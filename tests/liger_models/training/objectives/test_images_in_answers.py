"""Preferences between answers to prompts with images: a step minimises the objective's definition."""

import pytest
import torch
from drawn import COLOURS, WORDS, asked, picture, png

import liger_models
from liger_models import losses as of
from liger_models.convert.errors import DataError
from liger_models.images import Preprocessor
from liger_models.images.processor import Shown
from liger_models.training import loop
from liger_models.training.data import Stream, groups
from liger_models.training.data.pictured import part_images

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")


def reply(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def judged(tmp_path_factory, jsonl):
    """Files of answer pairs and of labelled answers.

    Prompts have one image, two, one in a column of its own, or none; some answers continue with the same or
    another image, and some pairs are whole conversations.
    """
    folder = tmp_path_factory.mktemp("judged")
    for colour in COLOURS:
        picture(colour, (24, 40)).save(folder / f"{colour}.png")
    names = [{"type": "image", "image": f"{colour}.png"} for colour in COLOURS]
    prompts = [
        {"prompt": asked(names[0], "red")["messages"][:1]},
        {"prompt": [{"role": "user", "content": [*names[1:], {"type": "text", "text": "what and what?"}]}]},
        {"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["blue.png"]},
        {"prompt": [{"role": "user", "content": "what?"}]},
        {"prompt": asked(names[0], "red")["messages"] + asked(names[1], "")["messages"][:1]},
    ]
    answers = [("red", "blue"), ("green and blue", "red"), ("blue", "red and red"), ("?", "red"), ("red", "")]
    answers[-1] = "green", "blue and red and red"
    pairs = [
        p | {"chosen": reply(a), "rejected": reply(b)} for p, (a, b) in zip(prompts, answers, strict=True)
    ]
    later = asked(names[2], "blue")["messages"]
    pairs.append(
        pairs[0] | {"chosen": reply("red") + later, "rejected": reply("red") + later[:1] + reply("?")}
    )
    pairs.append(
        {kind: prompts[0]["prompt"] + reply(c) for kind, c in (("chosen", "red"), ("rejected", "?"))}
    )
    other = asked(names[1], "blue")["messages"]
    pairs.append({"prompt": prompts[0]["prompt"] + reply("red"), "chosen": later, "rejected": other})
    labelled = [
        p | {"completion": reply(a), "label": i % 3 > 0}
        for i, (p, both) in enumerate(zip(prompts, answers, strict=True))
        for a in both
    ][:8]
    return {
        "pairs": jsonl(folder / "pairs.jsonl", pairs),
        "labelled": jsonl(folder / "labelled.jsonl", labelled),
    }


@pytest.fixture
def configured(settings, vision_model, judged):
    def make(name, **changes):
        data = judged["labelled" if name == "kto" else "pairs"]
        defaults = {
            "eval_fraction": 0.0,
            "seq_len": 192,
            "steps": 4,
            "model": str(vision_model),
            "data": (data,),
        }
        return settings(objective=name, **{**defaults, **changes})

    return make


GIVEN = {
    "dpo": {"beta": 0.3},
    "orpo": {"beta": 0.2},
    "simpo": {"beta": 1.5, "margin": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 0.8},
}


def expected_loss(name, run, reference, rows):
    """Compute the objective's definition on single sequences, with one call of the model for each."""
    own, image_id = Preprocessor(run.config.model, run.model.spec), WORDS.index("<|image_pad|>")

    def score(model, ids, trained, images):
        call = own.call(Shown(ids, trained, images)) if images else {}
        logits = model(ids[None], **call).logits[0, :-1].double()
        found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return found[trained[1:]], found[ids[1:] != image_id]

    scored, before, good = [], [], []
    for piece in (piece for row in rows for piece in row):
        corpus, number = run.documents._place(piece)
        cut, is_good = corpus.groups[number].tolist()
        ids, trained = run.documents.read(*piece)
        shown = part_images(corpus.images(piece.start))
        two = [(ids[:cut].long(), trained[:cut], shown[0]), (ids[cut:].long(), trained[cut:], shown[1])]
        scored.append([score(run.model, *one) for one in two])
        with torch.no_grad():
            before.append(torch.stack([score(reference, *one)[0].sum() for one in two]))
        good.append(bool(is_good))
    sums = torch.stack([torch.stack([one[0].sum() for one in two]) for two in scored])
    means = torch.stack([torch.stack([one[0].mean() for one in two]) for two in scored])
    before = torch.stack(before)
    if name == "dpo":
        return of.dpo_loss(*sums.T, *before.T, beta=0.3).loss
    if name == "orpo":
        everything = torch.cat([two[0][1] for two in scored])
        return of.orpo_loss(*means.T, -everything.mean(), beta=0.2).loss
    if name == "simpo":
        return of.simpo_loss(*means.T, beta=1.5, gamma=0.4).loss
    kl = of.kto_kl(sums[:, 1].detach(), before[:, 1])
    return of.kto_loss(sums[:, 0], before[:, 0], torch.tensor(good), kl, beta=0.3, desirable_weight=0.8).loss


@pytest.mark.parametrize("name", GIVEN)
def test_a_step_has_the_gradient_of_the_definition_over_all_its_micro_batches(
    name, configured, vision_model, monkeypatch
):
    """The gradient of the encoder is correct too.

    Objectives that can do so compute prompts and their images once, except for the two pairs with images in
    answers.
    """
    monkeypatch.setattr(groups, "SPARED", 0.0)
    config = configured(
        name,
        objective_options=GIVEN[name],
        seq_len=400,
        clip=0.0,
        gradient_accumulation=2 if name == "kto" else 3,  # all data, in as many rows
    )
    run = loop.Run(config, loop.World(config.device))
    with torch.no_grad():  # so that the policy differs from its reference
        for parameter in run.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rows = list(Stream(run.documents, 400, config.seed).epoch(0))
    assert [len(rows), sum(map(len, rows))] == [config.gradient_accumulation, 8]
    expected = expected_loss(name, run, liger_models.from_hub(vision_model, device="cpu"), rows)
    gradients = torch.autograd.grad(expected, list(run.model.parameters()))
    kept, pixels = [], []
    run.optimizer.step = lambda: kept.extend(p.grad.clone() for p in run.model.parameters())
    cut = run.model.vision.encoder.patch_embed
    cut.register_forward_hook(lambda module, inputs, output: pixels.append(len(output)))
    outcome = run.step(1e-3, loop.Signals())
    shares = name in ("dpo", "simpo")
    assert len(outcome.data.counts.shared) == (6 if shares else 0)
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-5)
    for found, wanted in zip(kept, gradients, strict=True):
        # Sums of about 800 tokens with float32's 6e-8, in five layers: 2e-5 of the largest entry.
        assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max() + 1e-9
    if shares:  # 7 images once; for two pairs an image of the prompt and one of the answer, in both answers
        assert sum(pixels) == (7 + 2 * 2 * 2) * 8 * 14


def test_reference_scores_match_transformers(configured):
    """Reference scores are stored with the corpus, computed once before training."""
    transformers = pytest.importorskip("transformers")
    config = configured("dpo")
    run = loop.Run(config, loop.World(config.device))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        config.model, attn_implementation="eager"
    )
    corpus = run.documents.parts[0].corpus
    own = Preprocessor(config.model, run.model.spec)
    for number in range(len(corpus)):
        start, stop = corpus.starts[number : number + 2].tolist()
        ids, trained = corpus.read(start, stop)
        cut, shown = int(corpus.groups[number, 0]), part_images(corpus.images(start))
        for side, tokens in enumerate((slice(None, cut), slice(cut, None))):
            mine = ids[tokens].long()
            call = own.call(Shown(mine, trained[tokens], shown[side])) if shown[side] else {}
            with torch.no_grad():
                logits = theirs(input_ids=mine[None], **call).logits[0, :-1].double()
            found = logits.log_softmax(-1).gather(-1, mine[1:, None])[:, 0][trained[tokens][1:]].sum()
            assert corpus.reference[number, side] == pytest.approx(found.item(), rel=1e-5)


def test_a_resumed_run_gives_the_same_bits(configured, run, losses, tmp_path):
    options = {"output": tmp_path / "run", "save_every": 1, "keep": 0, "steps": 2, "eval_fraction": 0.3}
    whole = run(configured("dpo", **options))
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "aside")
    again = run(configured("dpo", resume="auto", **options))
    assert losses(whole) == losses(again)
    weights = [liger_models.from_hub(r.final, device="cpu").state_dict() for r in (whole, again)]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))


def test_images_that_both_answers_share_are_stored_once(configured):
    config = configured("dpo")
    run = loop.Run(config, loop.World(config.device))
    corpus, kept = run.documents.parts[0].corpus, []
    for number in range(len(corpus)):
        kept.append(sorted(corpus.image_names(int(corpus.starts[number]))))
    alike = ["both.image_grid_thw", "both.pixel_values"]
    apart = ["both.image_grid_thw", "first.pixel_values", "second.pixel_values"]
    assert kept == [alike] * 3 + [[]] + [alike] * 3 + [apart]
    assert corpus.counts["images"] == 13


GOOD = {"prompt": asked({"type": "image", "image": "a.png"}, "")["messages"][:1], "chosen": reply("red")}
GOOD["rejected"] = reply("blue")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": asked({"type": "image", "image": "none.png"}, "")["messages"][:1]}, "does not exist"),
        ({"images": ["a.png"]}, "'images' has 1 images, and 1 of them have no place"),
        (
            {"chosen": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
            "an image, which",
        ),
        ({"rejected": reply("red " * 90)}, "its two answers with their prompts, and seq_len is 192"),
    ],
)
def test_unusable_images_are_named_by_file_and_line(configured, tmp_path, jsonl, changes, message):
    (tmp_path / "a.png").write_bytes(png("red", (24, 24)))
    file = jsonl(tmp_path / "bad.jsonl", [GOOD, GOOD | changes])
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: .*{message}"):
        loop.Run(configured("dpo", data=(file,)), loop.World("cpu"))


def test_examples_are_cut_only_after_their_images(configured, tmp_path, jsonl):
    (tmp_path / "a.png").write_bytes(png("red", (24, 24)))
    file = jsonl(tmp_path / "a.jsonl", [GOOD | {"rejected": reply("red " * 90)}])
    options = {"data": (file,), "truncate": True}
    assert loop.Run(configured("dpo", **options), loop.World("cpu")).documents.counts["truncated"] == 1
    with pytest.raises(
        DataError, match=r"line 1: .*image ends at position \d+, .* cut at half of seq_len 24"
    ):
        loop.Run(configured("dpo", seq_len=24, **options), loop.World("cpu"))
