"""Conversations with the tokenizers of real chat models. Opt-in: `make test` does not download these.

    LIGER_MODELS_TOKENIZERS=FOLDER python -m pytest tests/liger_models/training/text/test_real_tokenizers.py

Each folder within FOLDER, at any depth, that has tokenizer.json and a chat template is tested.
"""

import os
from pathlib import Path

import pytest
from conversations import CONVERSATIONS, OnePinnedDay

from liger_models.convert.errors import DataError
from liger_models.training.text.tokenizer import TextTokenizer

ROOT = os.environ.get("LIGER_MODELS_TOKENIZERS")
if not ROOT:
    pytest.skip("LIGER_MODELS_TOKENIZERS names no folder of tokenizers", allow_module_level=True)
transformers = pytest.importorskip("transformers")
FOLDERS = sorted(path.parent for path in Path(ROOT).rglob("tokenizer.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_ids_match_transformers_and_learned_tokens_decode_to_answers(folder, monkeypatch):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", OnePinnedDay)
    ours = TextTokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if not theirs.chat_template:
        pytest.skip("the tokenizer has no chat template")
    compared = 0
    for conversation, (messages, options) in CONVERSATIONS.items():
        try:
            rendering = ours.render(messages, 0, options)
        except DataError:  # the template refuses it
            continue
        [(ids, marks)] = ours.encode_spans([rendering.text], [rendering.spans], add_special_tokens=False)
        learned = ours.backend.decode(
            [index for index, mark in zip(ids, marks, strict=True) if mark], skip_special_tokens=False
        )
        expected = "".join(rendering.text[start:stop] for start, stop in rendering.spans)
        assert expected.strip() in learned or learned.strip() in expected, conversation
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # the template refuses this form of the conversation but accepts another
            continue
        if text == rendering.text:
            compared += 1
            assert theirs.apply_chat_template(messages, return_dict=False, **options) == ids, conversation
    assert compared >= 5
