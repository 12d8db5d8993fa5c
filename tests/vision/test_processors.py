"""Outputs of transformers' processors, for single conversations and several packed ones."""

from __future__ import annotations

import importlib.util
import io
import json

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import DataError
from liger_models.images import Preprocessor, Video
from liger_models.images.processor import load_processor
from liger_models.layers.specs import VisionSpec
from liger_models.layers.vision.packing import VisionConversation, pack_conversations

Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")

# For each family: its processor, its image processor, their settings, and the names of its tokens in order of
# id, beginning with the image token.
QWEN = {"patch_size": 3, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 2048}
GLM = {
    **{"patch_size": 3, "temporal_patch_size": 2, "merge_size": 2},
    "size": {"shortest_edge": 64, "longest_edge": 2048},
}
FAMILIES = {
    "qwen3_vl": ("Qwen3VL", "Qwen2VL", QWEN, {}, ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"]),
    "video_llama_3": (
        *("VideoLlama3", "VideoLlama3", {**QWEN, "merge_size": 1, "temporal_patch_size": 1}, {}),
        ["<|image_pad|>", "<|video_pad|>"],
    ),
    "gemma3": (
        *("Gemma3", "Gemma3", {"size": {"height": 16, "width": 16}}, {"image_seq_length": 4}),
        ["<soft>", "<boi>", "<eoi>"],
    ),
    "mistral3": (
        *("Pixtral", "Pixtral", {"size": {"longest_edge": 48}, "patch_size": {"height": 6, "width": 6}}),
        *({"patch_size": 3, "spatial_merge_size": 2}, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]),
    ),
    "llava": (
        *("Llava", "CLIP", {"size": {"shortest_edge": 7}, "crop_size": {"height": 7, "width": 7}}),
        {"patch_size": 3, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ["<image>"],
    ),
    "gemma4": (
        *("Gemma4", "Gemma4", {"patch_size": 3, "pooling_kernel_size": 2, "max_soft_tokens": 70}, {}),
        ["<soft>", "<|video|>", "<boi>", "<eoi>", "<audio>", "<boa>", "<eoa>"],
    ),
    "llava_onevision": (
        "LlavaOnevision",
        "LlavaOnevision",
        {
            "size": {"height": 10, "width": 10},
            "image_grid_pinpoints": [[10, 10], [20, 10], [20, 20], [40, 10], [20, 40]],
        },
        {
            "num_image_tokens": 9,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
        ["<image>", "<video>"],
    ),
    "llava_next": (
        "LlavaNext",
        "LlavaNext",
        {
            "size": {"shortest_edge": 9},
            "crop_size": {"height": 9, "width": 9},
            "image_grid_pinpoints": [[9, 9], [18, 9], [18, 18], [36, 9], [18, 36]],
        },
        {"patch_size": 3, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ["<image>"],
    ),
    "idefics3": (
        "Idefics3",
        "Idefics3",
        {"size": {"longest_edge": 26}, "max_image_size": {"longest_edge": 13}},
        {"image_seq_len": 4},
        [
            *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
            *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
        ],
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoe",
        "Ernie4_5_VLMoe",
        {"patch_size": 3, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}},
        {},
        ["<image>", "<video>", "<image_start>", "<image_end>", "<video_start>", "<video_end>"],
    ),
    "glm4v": (
        "Glm4v",
        "Glm4v",
        GLM,
        {},
        ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        "Lfm2Vl",
        {
            "encoder_patch_size": 3,
            "tile_size": 12,
            "max_tiles": 2,
            "min_image_tokens": 4,
            "max_image_tokens": 9,
        },
        {},
        [
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *("<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_row_2_col_1|>"),
        ],
    ),
    "molmo2": (
        "Molmo2",
        "Molmo2",
        {
            "size": {"height": 15, "width": 15},
            "patch_size": 3,
            "pooling_size": [2, 2],
            "overlap_margins": [1, 1],
            "max_crops": 3,
        },
        {},
        [
            *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>"),
            *("<frame_end>", "<im_low>", "<|image|>", "<|video|>"),
        ],
    ),
    "minicpmv4_7": (
        "MiniCPMV4_7",
        "MiniCPMV4_6",
        {"patch_size": 3, "scale_resolution": 24, "max_slice_nums": 4},
        {},
        [
            *("<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>"),
            *("<image_id>", "</image_id>"),
        ],
    ),
    "mllama": (
        *("Mllama", "Mllama", {"size": {"height": 14, "width": 14}, "max_image_tiles": 3}, {}),
        ["<|image|>"],
    ),
    "internvl": (
        "InternVL",
        "GotOcr2",
        {"size": {"height": 13, "width": 13}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 4},
        ["<ctx>", "<video>", "<img>", "</img>"],
    ),
}
NAMED = {
    "minicpmv4_7": {
        **{f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video")},
        **{f"{kind}_start_token": f"<{kind}>" for kind in ("image", "slice", "image_id")},
        **{f"{kind}_end_token": f"</{kind}>" for kind in ("image", "slice", "image_id")},
    },
    "ernie4_5_vl_moe": {
        f"{kind}{place}_token": f"<{kind}{place}>"
        for kind in ("image", "video")
        for place in ("", "_start", "_end")
    },
    "gemma3": {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    "gemma4": {
        "image_token": "<soft>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "audio_token": "<audio>",
        "boa_token": "<boa>",
        "eoa_token": "<eoa>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<ctx>",
        "video_token": "<video>",
    },
}
IN_TEXT = {
    "gemma3": "<boi>",
    "molmo2": "<|image|>",
    "qwen3_vl": "<|vision_start|><|image_pad|>",
    "ernie4_5_vl_moe": "<image_start><image><image_end>",
}


@pytest.fixture(params=FAMILIES)
def vision_model(request, tmp_path):
    """A preprocessor over generated files, its model, and the placeholder of an image in text."""
    family = request.param
    if family in ("lfm2_vl", "mistral3", "molmo2") or (
        family == "gemma4" and transformers.__version__ < "5.23"
    ):
        pytest.importorskip("torchvision", reason="this processor of transformers needs torchvision")
    processor, images, settings, options, tokens = FAMILIES[family]
    torch.manual_seed(0)
    tiny = find_architecture(family).tiny
    text = {**tiny["text_config"], "max_position_embeddings": 512}
    model = liger_models.from_config({**tiny, "text_config": text}, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    first = model.spec.vision.image_id
    words |= {token: first + i for i, token in enumerate(tokens)}
    rest = iter(set(range(40)) - set(words.values()))
    words |= {word: next(rest) for word in ("what", "?", "red", "blue", " ", "\n", "\n\n")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    special = ["<pad>", "<s>", "</s>", *tokens]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\s|\w+|[^\w\s]"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    written = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "extra_special_tokens": NAMED.get(family, {}),
        },
        "preprocessor_config.json": {"image_processor_type": f"{images}ImageProcessor", **settings},
        "processor_config.json": {"processor_class": f"{processor}Processor", **options},
    }
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content))
    return Preprocessor(tmp_path, model.spec), model, IN_TEXT.get(family, tokens[0])


def png(size: tuple[int, int], colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format="PNG")
    return file.getvalue()


def conversation(preprocessor, place, answer, *images):
    asked = "<s>" + "".join(f"{place}what?" for _ in images)
    return preprocessor(asked + answer, [(len(asked), len(asked + answer))], images)


def test_packed_conversations_equal_separate_ones(vision_model):
    preprocessor, model, place = vision_model
    red, blue = png((31, 22), (250, 3, 3)), png((20, 25), (3, 3, 250))
    text = VisionConversation(torch.tensor([1, 20, 21, 22]), torch.tensor([False, False, True, True]), {})
    made = [
        conversation(preprocessor, place, "red", red),
        conversation(preprocessor, place, "blue red", blue, red),
        text,
        conversation(preprocessor, place, "blue", blue),
    ]
    assert [int(one.learned.sum() if one is text else one.trained.sum()) for one in made] == [1, 3, 2, 1]
    seen = [VisionConversation(*one) for one in made]

    def losses(conversations):
        ids = torch.cat([one.ids for one in conversations])[None]
        learned = torch.cat([one.learned & (torch.arange(len(one.ids)) > 0) for one in conversations])
        bounds = torch.tensor([0, *(len(one.ids) for one in conversations)]).cumsum(0).int()
        labels = ids.masked_fill(~learned[None], -100)
        call = pack_conversations(model.spec.vision, conversations)
        options = {"labels": labels, "cu_seqlens": bounds, "num_items_in_batch": 7}
        return model(ids, **options, **call).loss

    # The same float32 products in other shapes.
    torch.testing.assert_close(losses(seen), sum(losses([one]) for one in seen), rtol=1e-5, atol=1e-6)


def test_images_that_do_not_match_their_text_are_refused(vision_model):
    preprocessor, _, place = vision_model
    image = png((24, 24), (9, 9, 9))
    for text, images in ((f"{place}{place}what?", [image]), ("what?", [image])):
        with pytest.raises(DataError):
            preprocessor(text, [], images)
    too_small = preprocessor.spec.vision.patches.size - 1
    with pytest.raises(DataError, match="too small"):
        preprocessor(place, [], [png((too_small, 30), (9, 9, 9))])


def test_images_repeated_in_the_next_conversation_are_processed_once(vision_model, monkeypatch):
    """Two answers to a prompt share images in this way; other images are not cached."""
    preprocessor, _, place = vision_model
    red, blue = png((31, 22), (250, 3, 3)), png((20, 25), (3, 3, 250))
    afresh = Preprocessor(preprocessor.folder, preprocessor.spec)
    expected = conversation(afresh, place, "blue red", red, blue)
    conversation(preprocessor, place, "red", red, blue)
    counted, kind = [], type(preprocessor._processor.image_processor.image_processor)
    process = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda *given, **options: counted.append(given) or process(*given, **options)
    )
    found = conversation(preprocessor, place, "blue red", red, blue)
    assert torch.equal(found.ids, expected.ids)
    assert found.images.keys() == expected.images.keys()
    assert all(torch.equal(found.images[name], x) for name, x in expected.images.items())
    assert not counted
    other = conversation(preprocessor, place, "red", blue, blue)
    assert len(counted) == 1
    expected = conversation(afresh, place, "red", blue, blue)
    assert all(torch.equal(other.images[name], x) for name, x in expected.images.items())


def test_token_types_match_the_processor(vision_model):
    preprocessor, _, place = vision_model
    if not isinstance(preprocessor.spec.vision, VisionSpec) or preprocessor.spec.vision.kinds is None:
        pytest.skip("this family needs none")
    made = conversation(preprocessor, place, "red", png((24, 24), (9, 9, 9)))
    given = preprocessor._processor(
        images=[[Image.new("RGB", (24, 24))]],
        text=[f"<s>{place}what?red"],
        return_tensors="pt",
        padding=False,
    )
    name = preprocessor.spec.vision.kinds
    assert torch.equal(preprocessor.call(made)[name], given[name])


VIDEOS = {
    "qwen3_vl": ("Qwen3VL", {**QWEN, "size": {"shortest_edge": 64, "longest_edge": 4096}}, "<|video_pad|>"),
    "gemma4": ("Gemma4", {"patch_size": 3, "pooling_kernel_size": 2, "max_soft_tokens": 70}, "<|video|>"),
    "llava_onevision": ("LlavaOnevision", {"size": {"height": 10, "width": 10}}, "<video>"),
    "internvl": ("InternVL", {"size": {"height": 13, "width": 13}}, "<video>"),
    "molmo2": (
        "Molmo2",
        {
            "size": {"height": 15, "width": 15},
            "patch_size": 3,
            "pooling_size": [3, 3],
            "do_rescale": True,
            "do_normalize": True,
        },
        "<|video|>",
    ),
    "video_llama_3": (
        "VideoLlama3",
        {"patch_size": 3, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        "<|video_pad|>",
    ),
}


def test_frames_of_videos_match_the_familys_processor(vision_model, request):
    """The video is next to an image, and packed after another conversation."""
    family = request.node.callspec.params["vision_model"]
    preprocessor, model, place = vision_model
    frames = [png((24, 18), (60 * i, 3, 3)) for i in range(4)]
    video = Video(frames, 2.0)
    if family not in VIDEOS:
        # Some processors know videos, whose frames the model here takes as images only. They, or the model,
        # refuse them in words of their own, or for want of torchvision or of a font.
        known = "video_processor" in getattr(transformers, f"{FAMILIES[family][0]}Processor").get_attributes()
        with pytest.raises(DataError, match=None if known else "does not support videos: pass some"):
            preprocessor("what?", [], [video])
        return
    name, settings, video_place = VIDEOS[family]
    if family == "qwen3_vl":
        settings.pop("min_pixels", None), settings.pop("max_pixels", None)
    written = {"video_processor_type": f"{name}VideoProcessor", **settings}
    (preprocessor.folder / "video_preprocessor_config.json").write_text(json.dumps(written))
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(DataError, match="videos need torchvision"):
            preprocessor("what?", [], [video])
        return
    image = png((20, 25), (3, 3, 250))
    pictures = [] if family == "molmo2" else [image]  # whose tokens have the id of the video's
    text = f"<s>{''.join(f'{place}what?' for _ in pictures)}{video_place}what?red"
    if family == "gemma4" and transformers.__version__ < "5.23":  # its videos have another form
        with pytest.raises(DataError, match="without num_frames_per_video"):
            preprocessor(text, [], [image, video])
        return
    made = preprocessor(text, [(len(text) - 3, len(text))], [*pictures, video])
    assert made.trained.tolist() == [False] * (len(made.ids) - 1) + [True]
    # Gemma 4's AutoProcessor also needs an audio feature extractor.
    load = load_processor if family == "gemma4" else transformers.AutoProcessor.from_pretrained
    options = {"videos": True} if family == "gemma4" else {}
    given = load(preprocessor.folder, **options)(
        images=[[Image.open(io.BytesIO(one)) for one in pictures]] if pictures else None,
        videos=[[Image.open(io.BytesIO(frame)) for frame in frames]],
        video_metadata=[{"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}],
        do_sample_frames=False,
        text=[text],
        return_tensors="pt",
        add_special_tokens=False,
        padding=False,
    )
    assert torch.equal(made.ids, given["input_ids"][0])
    for name, tensor in made.images.items():
        if name != "pixel_values":  # the Pillow backend rounds differently
            torch.testing.assert_close(tensor, torch.as_tensor(given[name]).to(tensor.dtype))
    other = preprocessor(f"<s>{video_place}what?", [], [Video(frames[:2], 2.0)])
    call = pack_conversations(model.spec.vision, [VisionConversation(*other), VisionConversation(*made)])
    ids = torch.cat([other.ids, made.ids])[None]
    bounds = torch.tensor([0, len(other.ids), ids.shape[1]])
    with torch.no_grad():
        packed = model(ids, cu_seqlens=bounds, **call).logits[0, len(other.ids) :]
        alone = model(made.ids[None], **preprocessor.call(made)).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
