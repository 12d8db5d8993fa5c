"""Training step of vision-language models: every provider gets the same batch, and the table has ratios."""

import copy

import pytest

import liger_models
from liger_models.architectures import find_architecture

MODEL = "tiny-vl"


def test_providers_are_compared_on_images_of_three_sizes(benchmarks, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    from benchmarks import vision
    from benchmarks.training import batches, step

    def in_this_process(groups, devices, time_limit, ahead):
        for job in (job for group in groups for job in group):
            yield job, step.measure(job, step.torch.device("cpu"))

    monkeypatch.setattr(vision, "measure_all", in_this_process)
    for name, size in (("SMALL", (4, 4)), ("MIDDLE", (8, 6)), ("LARGE", (10, 12))):
        monkeypatch.setattr(batches, name, batches.Image(*size))
    providers = ("ours:lean", "ours:auto=1", "transformers:none")
    wanted = [word for provider in providers for word in ("--configuration", provider)]
    sizes = ["--seq", "16", "--warmup", "1", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)]
    page = tmp_path / "page.md"
    assert benchmarks.__main__.main(["vision", "--model", MODEL, *wanted, *sizes, "--page", str(page)]) == 0
    ours, chosen, theirs = capsys.readouterr().out.strip().splitlines()[-3:]
    assert f"| {MODEL} | ours | lean |" in ours
    assert f"| {MODEL} | ours | auto=1 |" in chosen
    assert f"| {MODEL} | transformers | none |" in theirs
    assert " x |" in theirs
    assert vision.TITLE in page.read_text()


@pytest.mark.parametrize("family", liger_models.list_architectures(vision=True))
def test_every_vision_language_family_accepts_the_images(family, benchmarks, monkeypatch):
    """This holds for any number of patches that a projector merges."""
    from benchmarks.training import batches, step

    for name, size in (("SMALL", (8, 8)), ("MIDDLE", (10, 16)), ("LARGE", (14, 8))):
        monkeypatch.setattr(batches, name, batches.Image(*size))
    config = copy.deepcopy(dict(find_architecture(family).tiny))
    config["text_config"]["max_position_embeddings"] = 512
    job = step.Job("tiny", config, "ours", batch=3, seq=16, data=batches.IMAGES, warmup=0, steps=1)
    result = step.measure(job, step.torch.device("cpu"))
    assert result["tokens_per_second"] > 0


def test_random_text_contains_no_image_placeholders(benchmarks):
    from benchmarks.training import batches
    from benchmarks.training.shapes import config_of

    scenes = batches._scenes(config_of(MODEL) | {"image_token_id": 20, "video_token_id": 21})
    scenes.vocab_size = 30
    assert set(scenes.tokens([1000])) == {*range(10, 30)} - {20, 21}


def test_tokens_of_images_count_and_padding_does_not(benchmarks):
    from benchmarks.training import batches
    from benchmarks.training.shapes import config_of

    config = config_of(MODEL)
    call = batches.make_batch(batches.IMAGES, 4, 16, config, batches.torch.device("cpu"))
    real = int(call["attention_mask"].sum())
    assert batches.count_tokens(batches.IMAGES, 4, 16, config) == real < call["input_ids"].numel()
    patches = int(call["image_grid_thw"].prod(1).sum())
    assert real == 4 * 16 + patches // 4  # four patches make a token


def test_padding_is_no_image_placeholder(benchmarks):
    """A reference that looks for placeholders in all ids would count it: Aria's default is 9."""
    from benchmarks.training import batches
    from benchmarks.training.shapes import config_of

    scenes = batches._scenes(config_of(MODEL) | {"image_token_id": 9, "video_token_id": 8})
    call = scenes.make([[3], [9]])
    assert not scenes.kinds(call["input_ids"]).any()
    assert call["attention_mask"].sum(1).tolist() == [3, 9]
