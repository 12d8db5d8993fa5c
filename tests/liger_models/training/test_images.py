"""Vision-language models are trained on conversations with images, from files to the checkpoint."""

import base64
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drawn import COLOURS, WORDS, asked, picture, png
from ranks import fork_server, run_ranks
from safetensors.torch import load_file

import liger_models
from liger_models.cli import generate, main
from liger_models.convert.errors import ConfigError, DataError
from liger_models.images import Preprocessor
from liger_models.training.data import Stream, load_documents, pictured
from liger_models.training.data.reading import tables
from liger_models.training.text.tokenizer import TextTokenizer

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory, jsonl):
    """Conversations with none, one or two images of several sizes, referenced in every supported form."""
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "photos").mkdir()
    rng, records = random.Random(0), []
    for i in range(24):
        colour = rng.choice(list(COLOURS))
        size = rng.choice([16, 24, 32]), rng.choice([16, 24, 40])
        file = folder / "photos" / f"{i}.png"
        picture(colour, size).save(file)
        text = base64.b64encode(file.read_bytes()).decode()
        form = [
            asked({"type": "image", "image": f"photos/{i}.png"}, colour),
            asked({"type": "image", "path": str(file)}, colour),
            asked({"type": "image", "url": f"data:image/png;base64,{text}"}, colour),
            asked({"type": "image_url", "image_url": {"url": file.as_uri()}}, colour),
            asked({"type": "image"}, colour) | {"images": [text]},
            {
                "messages": [
                    {"role": "user", "content": "<image>what? and <image>"},
                    {"role": "assistant", "content": f"{colour} and {colour}"},
                ],
                "images": [f"photos/{i}.png", {"bytes": text, "path": None}],
            },
            {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]},
        ]
        records.append(form[i % len(form)])
    return jsonl(folder / "chats.jsonl", records)


@pytest.fixture
def vision_settings(settings, vision_model, conversations):
    def make(**changes):
        return settings(**{"model": str(vision_model), "data": (conversations,), "seq_len": 96} | changes)

    return make


@pytest.fixture(scope="module")
def load(vision_model, conversations, tmp_path_factory):
    """Function that loads files, by default the conversations, and returns documents and a model."""
    model = liger_models.from_hub(vision_model, device="cpu")
    cache = tmp_path_factory.mktemp("images")

    def make(*files, **options):
        options = {"seq_len": 96, "vocab_size": len(WORDS), "cache": cache} | options
        preprocessor = Preprocessor(vision_model, model.spec)
        files = [str(file) for file in files] or [conversations]
        return load_documents(files, TextTokenizer(vision_model), images=preprocessor, **options), model

    return make


def test_a_run_resumes_bit_for_bit_and_its_export_generates(vision_settings, run, losses, tmp_path, capsys):
    whole = run(vision_settings(output=tmp_path / "whole"))
    run(vision_settings(output=tmp_path / "parts", steps=3))
    parts = run(vision_settings(output=tmp_path / "parts", resume="auto"))
    assert losses(whole)[3:] == losses(parts)[3:]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole.final, parts.final)]
    assert weights[0] == weights[1]
    file = tmp_path / "red.png"
    picture("red", (24, 24)).save(file)
    question = ["generate", str(whole.final), "--prompt", "what?", "--max-new-tokens", "2"]
    capsys.readouterr()
    for images in (1, 2):
        assert main([*question, *["--image", str(file)] * images]) == 0
        assert capsys.readouterr().out.startswith("what?\n")
    assert main([*question, "--image", str(tmp_path / "none.png")]) == 2
    assert "none.png does not exist" in capsys.readouterr().err


def test_generate_passes_the_users_question_to_the_model(load, vision_model, tmp_path):
    _, model = load()
    (tmp_path / "a.png").write_bytes(png("blue", (24, 32)))
    files = [str(tmp_path / "a.png")] * 2
    ids, images = generate.ask("what?", files, vision_model, model.spec, TextTokenizer(vision_model), [])
    turns = "".join(WORDS[i] for i in ids).split("<|im_start|>")[1:]
    image = "<|vision_start|>" + "<|image_pad|>" * len(images["pixel_values"][::8]) + "<|vision_end|>"
    assert turns == [f"user\n{image}{image}what?<|im_end|>\n", "assistant\n"]
    assert images["image_grid_thw"].tolist() == [[1, 10, 8]] * 2  # grids of patches of 3 pixels
    assert model(torch.tensor([ids]), **images).logits.isfinite().all()


def test_images_in_tables_and_data_sets_equal_those_of_json_lines(load, jsonl, tmp_path, monkeypatch):
    """Parquet files have structs with bytes, and data sets of the hub yield Pillow images."""
    parquet, datasets = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("datasets")
    import pyarrow

    messages = [
        {"role": "user", "content": "<image>what?"},
        {"role": "assistant", "content": "green"},
    ]
    image = png("green", (24, 16))
    text = base64.b64encode(image).decode()
    lines = jsonl(tmp_path / "lines.jsonl", [{"messages": messages, "images": [text]}] * 2)
    rows = [{"messages": messages, "images": [{"bytes": image, "path": None}]}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    features = {"messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
    features["images"] = datasets.List(datasets.Image())
    streamed = datasets.Dataset.from_list(rows, datasets.Features(features)).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **options: streamed)
    monkeypatch.setattr(tables, "commit_of", lambda name: "one")

    expected, _ = load(lines)
    (row,) = Stream(expected, 96, 0).take(1)
    for name in (tmp_path / "table.parquet", "hf:owner/pictures"):
        found, _ = load(name)
        (same,) = Stream(found, 96, 0).take(1)
        batches = expected.batch([row]), found.batch([same])
        assert torch.equal(batches[0].input_ids, batches[1].input_ids)
        assert torch.equal(batches[0].shift_labels, batches[1].shift_labels)
        assert torch.equal(batches[0].images["pixel_values"], batches[1].images["pixel_values"])


def test_each_answer_is_learned_with_the_images_before_it(load, tmp_path, jsonl):
    for number, colour in enumerate(("red", "blue")):
        picture(colour, (16, 16)).save(tmp_path / f"{number}.png")
    messages = [
        message
        for number, colour in enumerate(("red", "blue"))
        for message in (
            {"role": "user", "content": [{"type": "image", "image": f"{number}.png"}]},
            {"role": "assistant", "content": colour},
        )
    ]
    documents, _ = load(jsonl(tmp_path / "chat.jsonl", [{"messages": messages}]), train_on="each")
    corpus = documents.parts[0].corpus
    shown = [len(corpus.images(start)["image_grid_thw"]) for start in corpus.starts[:-1].tolist()]
    learned = [int(corpus.read(a, b)[1].sum()) for a, b in itertools.pairwise(corpus.starts.tolist())]
    assert shown == [1, 2]
    assert learned[0] == learned[1] > 0


def test_a_packed_row_has_the_loss_and_gradients_of_its_separate_conversations(load):
    documents, model = load()
    (row,) = Stream(documents, 4096, 0).take(1)
    assert len(row) == 24
    batches = [documents.batch([row]), *(documents.batch([[piece]]) for piece in row)]
    assert len(batches[0].images["image_grid_thw"]) == 24
    labels = int((batches[0].shift_labels != -100).sum())

    def run(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            bounds = {"cu_seqlens": batch.cu_seqlens, "shift_labels": batch.shift_labels}
            loss = model(batch.input_ids, num_items_in_batch=labels, **bounds, **batch.images).loss
            loss.backward()
            total += loss.item()
        return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    together, packed = run(batches[:1])
    alone, separate = run(batches[1:])
    assert together == pytest.approx(alone, rel=1e-6)
    assert {"vision.encoder.patch_embed.weight", "layers.0.mlp.down_proj.weight"} <= packed.keys()
    for name, gradient in separate.items():
        # Sums over about 800 tokens in another order: 6e-8 * sqrt(800) = 1.7e-6 of the largest entry, and
        # three times that for the worst of thousands of entries.
        assert (packed[name] - gradient).abs().max() <= 5e-6 * gradient.abs().max() + 1e-9, name


def test_only_answers_are_trained(load):
    documents, _ = load()
    (row,) = Stream(documents, 4096, 0).take(1)
    for piece in row:
        ids, labels = documents.inputs(piece).tolist(), documents.labels(piece)
        learned = [WORDS[i] for i in labels[labels != -100]]
        assert learned[-2:] == ["<|im_end|>", "\n"]
        assert set(learned[:-2]) <= {*COLOURS, "and", " "}
        assert len(learned) == (7 if "and" in learned else 3)
        images = documents.batch([[piece]]).images
        features = int(images["image_grid_thw"].prod(1).sum()) // 4 if images else 0
        assert ids.count(WORDS.index("<|image_pad|>")) == features


class VideoProcessor(dict):  # which processors can log
    """Replacement for a video processor of transformers, for frames that need no resizing."""

    temporal_patch_size, merge_size, model_input_names = 2, 2, ["pixel_values_videos", "video_grid_thw"]

    def __init__(self, vision):
        self.vision = vision

    def __call__(self, videos, video_metadata, do_sample_frames, **options):
        assert not do_sample_frames
        made = [self.vision.cut(torch.from_numpy(video).permute(0, 3, 1, 2) / 255) for video in videos]
        from transformers.video_utils import VideoMetadata

        return {
            "pixel_values_videos": torch.cat([patches for patches, _ in made]),
            "video_grid_thw": torch.tensor([grid for _, grid in made]),
            "video_metadata": [VideoMetadata(**about) for about in video_metadata],
        }


def test_videos_are_trained_by_their_frames(load, jsonl, tmp_path, monkeypatch):
    """Videos are trained next to images, in a row of their own and packed, with the times of their frames."""
    _, model = load()
    monkeypatch.setattr("liger_models.images.processor._check_videos", lambda *found: None)
    made = VideoProcessor(model.vision)
    monkeypatch.setattr("transformers.AutoVideoProcessor", SimpleNamespace(from_pretrained=lambda name: made))
    monkeypatch.setattr(
        "transformers.processing_utils.ProcessorMixin.check_argument_for_proper_class", lambda *found: None
    )
    for i, colour in enumerate(("red", "green", "blue")):
        (tmp_path / f"{i}.png").write_bytes(png(colour, (24, 18)))
    frames = {"type": "video", "video": ["0.png", "1.png", "2.png"], "fps": 4}
    still = {"type": "image", "image": "0.png"}
    question = {"role": "user", "content": [frames, still, {"type": "text", "text": "what?"}]}
    both = {"messages": [question, {"role": "assistant", "content": "red"}]}
    file = jsonl(tmp_path / "a.jsonl", [asked(frames, "red"), both, asked(still, "blue")])
    documents, model = load(file)
    assert documents.counts["images"] == 3 + 4 + 1
    (row,) = Stream(documents, 512, 0).take(1)
    batch, alone = documents.batch([row]), [documents.batch([[piece]]) for piece in row]
    assert batch.images["video_grid_thw"].tolist() == [[2, 6, 8]] * 2
    assert batch.images["second_per_grid_ts"].tolist() == [0.5] * 2  # two frames of 0.25 s each
    assert batch.images["mm_token_type_ids"].eq(2).sum() == 2 * 24
    labels = int((batch.shift_labels != -100).sum())

    def loss(batch):
        bounds = {"cu_seqlens": batch.cu_seqlens, "shift_labels": batch.shift_labels}
        return model(batch.input_ids, num_items_in_batch=labels, **bounds, **batch.images).loss.item()

    assert loss(batch) == pytest.approx(sum(map(loss, alone)), rel=1e-5)
    (tmp_path / "1.png").write_bytes(png("green", (24, 24)))
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 1: a video has frames of 24 times 18 and 24 times 24"
    ):
        load(file)


def test_pieces_of_text_have_no_images(load, conversations, tmp_path):
    (tmp_path / "a.txt").write_text("what? " * 200)
    documents, _ = load(conversations, tmp_path / "a.txt")
    rows = list(Stream(documents, 96, 0).epoch(0))
    grids = [documents.batch([row]).images.get("image_grid_thw", ()) for row in rows]
    assert sum(map(len, grids)) == 24
    assert [documents.have_images([row]) for row in rows] == [len(found) > 0 for found in grids]
    assert any(len(found) == 0 for found in grids)


def test_images_are_preprocessed_once_and_again_if_one_has_changed(load, tmp_path, jsonl, monkeypatch):
    (tmp_path / "a.png").write_bytes(png("red", (24, 24)))
    file = jsonl(tmp_path / "a.jsonl", [asked({"type": "image", "path": "a.png"}, "red")])
    first = load(file)[0].fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(Preprocessor, "__call__", None)
        assert load(file, verify=True)[0].fingerprint() == first
    (tmp_path / "a.png").write_bytes(png("blue", (24, 24)))
    assert load(file)[0].fingerprint() != first
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the image .*a\.png does not exist"):
        load(file)


def test_train_reuses_the_corpus_of_tokenize(
    load, vision_model, conversations, tmp_path, capsys, monkeypatch
):
    command = ["tokenize", str(vision_model), "--data", conversations, "--seq-len", "96"]
    assert main([*command, "--data-cache", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "24 documents" in output
    assert "24 images" in output
    monkeypatch.setattr(Preprocessor, "__call__", None)
    assert load(cache=tmp_path)[0].fingerprint() == load()[0].fingerprint()


def test_worker_processes_build_the_same_corpus(load, monkeypatch, tmp_path):
    first = load()[0].parts[0].corpus
    context = fork_server()  # a fork of this process could wait for its threads, which it does not have
    monkeypatch.setattr(pictured, "ALONE", 0)
    monkeypatch.setattr(pictured, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    monkeypatch.setattr(pictured, "MOST_PROCESSES", 1)
    monkeypatch.setattr(pictured, "cores", lambda: 2)
    assert load(cache=tmp_path)[0].parts[0].corpus.digest == first.digest


def bad(message: str, record: dict, **files: bytes):
    return pytest.param(message, record, files, id=message[:40])


GOOD = png("green", (24, 24))
TWICE = {
    "messages": [{"role": "user", "content": "<image><image>"}, {"role": "assistant", "content": "red"}],
    "images": ["a.png", "a.png"],
}
BAD = [
    bad("the image .*none.png does not exist", asked({"type": "image", "path": "none.png"}, "red")),
    bad("is damaged", asked({"type": "image", "path": "a.png"}, "red"), a=GOOD[: len(GOOD) // 2]),
    bad("is in a format that Pillow", asked({"type": "image", "path": "a.png"}, "red"), a=b"GIF69x" * 40),
    bad(
        "is too small: 2 times 9 pixels",
        asked({"type": "image", "path": "a.png"}, "red"),
        a=png("red", (2, 9)),
    ),
    bad("nothing is downloaded", asked({"type": "image", "url": "https://example.org/a.png"}, "red")),
    bad("is not base64", asked({"type": "image", "url": "data:image/png;base64,?"}, "red")),
    bad("expected a path, bytes", asked({"type": "image", "image": 7}, "red")),
    bad("an image that is nowhere", asked({"type": "image"}, "red")),
    bad("2 of them have no place", asked({"type": "image"}, "red") | {"images": ["a.png"] * 3}, a=GOOD),
    bad("rejects 1 images", asked({"type": "image", "path": "a.png"}, "red", "<|image_pad|>"), a=GOOD),
    bad("the video 'a.mp4', and a video is its frames", asked({"type": "video", "video": "a.mp4"}, "red")),
    bad(
        "a video whose 'fps' is None; expected how many",
        asked({"type": "video", "video": ["a.png"]}, "red"),
    ),
    bad("part of type 'audio', and only images", asked({"type": "audio", "audio": "a.mp3"}, "red")),
    bad(
        "are 'videos', and a video is its frames",
        asked({"type": "text", "text": "?"}, "red") | {"videos": ["a"]},
    ),
    bad("frame.png does not exist", asked({"type": "video", "video": ["frame.png"], "fps": 2}, "red")),
    bad("'images' next to prompt/completion", {"prompt": "?", "completion": "red", "images": ["a.png"]}),
    bad("'images' next to text", {"text": "<image> is red", "images": ["a.png"]}),
    bad(
        "of the assistant has an image", {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}
    ),
    bad(
        "positions and seq_len is 96",
        TWICE,
        a=png("red", (160, 160)),
    ),
]


@pytest.mark.parametrize(("message", "record", "files"), BAD)
def test_unusable_images_are_named_by_file_and_line(load, tmp_path, jsonl, message, record, files):
    for name, content in files.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    good = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]}
    file = jsonl(tmp_path / "bad.jsonl", [good, record])
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: .*{message}"):
        load(file)


def test_bad_images_are_reported_before_the_model_is_loaded(
    vision_settings, run, tmp_path, jsonl, monkeypatch
):
    monkeypatch.setattr("liger_models.training.run_parts.load_model", None)
    file = jsonl(tmp_path / "a.jsonl", [asked({"type": "image", "path": "none.png"}, "red")])
    with pytest.raises(DataError, match="line 1"):
        run(vision_settings(data=(file,)))


def test_a_text_model_refuses_images(settings, run, conversations):
    with pytest.raises(DataError, match=r"line 1: the conversation has images, which this model does not"):
        run(settings(data=(conversations,)))


def test_examples_are_cut_only_after_their_images(load, tmp_path, jsonl):
    (tmp_path / "a.png").write_bytes(png("red", (24, 24)))
    long = asked({"type": "image", "path": "a.png"}, "red " * 30)
    file = jsonl(tmp_path / "a.jsonl", [long])
    documents, model = load(file, seq_len=32, truncate=True)
    ((piece,),) = Stream(documents, 32, 0).take(1)
    assert model(documents.inputs(piece)[None], **documents.batch([[piece]]).images).logits.isfinite().all()
    with pytest.raises(DataError, match="line 1: the example's last image ends at position 20"):
        load(file, seq_len=12, truncate=True)


def test_frozen_parts_stay_and_get_no_adapters(vision_settings, run, tmp_path, vision_model):
    result = run(vision_settings(output=tmp_path / "run", steps=2, freeze=("vision", "projector")))
    before, after = (liger_models.from_hub(folder, device="cpu") for folder in (vision_model, result.final))
    own = before.parts()
    names = {name for name, _ in before.vision.named_parameters(prefix="vision")}
    assert own.keys() == {"language", "vision", "projector"}
    then = dict(before.named_parameters())
    changed = {name for name, p in after.named_parameters() if not torch.equal(p, then[name])}
    assert changed
    assert not changed & names
    with pytest.raises(ConfigError, match=r"matches 'tower'.*of the model: language, vision, projector"):
        run(vision_settings(output=tmp_path / "none", freeze=("tower",)))


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("frozen", ["vision,projector", "language"])
def test_adapters_are_added_to_the_trained_part_only(frozen, quantize, vision_settings, run, tmp_path):
    """Layer names of an encoder and of a language model have the same suffixes."""
    pytest.importorskip("peft")
    if quantize:
        pytest.importorskip("bitsandbytes")
    # No evaluation: bitsandbytes cannot evaluate such small matrices on a CPU.
    options = {"lora": "r=2", "quantize": quantize, "eval_fraction": 0.0, "save_every": 0, "steps": 2}
    run(vision_settings(output=tmp_path, freeze=tuple(frozen.split(",")), **options))
    written = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert {".visual." in name for name in written} == {frozen == "language"}
    assert all(tensor.any() for tensor in written.values())  # B is initialised with zeros


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_processes_that_shard_the_model_or_the_data_train_like_one(vision_settings, run, tmp_path, jsonl):
    """Some rows have images, others have none."""
    (tmp_path / "a.png").write_bytes(png("red", (24, 24)))
    shown = asked({"type": "image", "path": "a.png"}, "red", "what " * 10)
    text = {"messages": [{"role": "user", "content": "what " * 20}, {"role": "assistant", "content": "red"}]}
    file = jsonl(tmp_path / "a.jsonl", [shown, text] * 4)
    options = {"data": (file,), "seq_len": 64, "steps": 3, "save_every": 0, "eval_fraction": 0.0}
    one = run(vision_settings(output=tmp_path / "one", **options, gradient_accumulation=2))
    planned = [
        vision_settings(output=tmp_path / shard, **options, gradient_accumulation=1, shard=shard).to_dict()
        for shard in ("full", "none")
    ]
    (tmp_path / "runs.json").write_text(json.dumps([(settings, 0, 2) for settings in planned]))
    run_ranks(Path(__file__).with_name("sharded_runs_rank.py"), tmp_path)
    expected = load_file(one.final / "model.safetensors")
    for shard in ("full", "none"):
        found = load_file(tmp_path / shard / "final" / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # Gradients are summed in another order, and AdamW divides them by their size: where they are only
            # rounding (key biases), steps are arbitrary.
            if not name.endswith("k_proj.bias"):
                assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
