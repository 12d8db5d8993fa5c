"""Streamed data: the rows of a corpus, block by block, resumed to the row, and the same on all processes."""

import itertools
import json
import threading
from pathlib import Path

import pytest

from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.data import BlockRequest, BlockStream, Position, Stream, load_documents
from liger_models.training.data import stream_documents as stream
from liger_models.training.data.reading import tables
from liger_models.training.data.streaming import Blocks, Closed
from liger_models.training.data.tokenizing import limits_of
from liger_models.training.text.tokenizer import TextTokenizer

SEQ_LEN = 64


@pytest.fixture
def opened(tokenizer_folder, tmp_path):
    """Opens streams, which are closed after the test."""
    tokenizer, streams = TextTokenizer(tokenizer_folder), []

    def request(names):
        return BlockRequest(names, tokenizer, limits_of(320, SEQ_LEN, None), False)

    def make(names, size, resumed=None, position=None):
        folder = tmp_path / f"blocks-{len(streams)}"
        documents = stream(names, request, size=size, folder=folder, resumed=resumed)
        position = position or Position(documents.blocks.first.number, 0)
        streams.append(BlockStream(documents, SEQ_LEN, 0, position))
        return streams[-1]

    make.request = request
    yield make
    for one in streams:
        one.blocks.close()
        assert not one.blocks.folder.exists()


def contents(source, rows):
    return [[source.documents.inputs(piece).tolist() for piece in row] for row in rows]


def documents_of(rows):
    """The inputs of rows, sorted by piece: rows of blocks are cut at other places than rows of an epoch."""
    return sorted(itertools.chain.from_iterable(piece for row in rows for piece in row))


@pytest.mark.parametrize("size", [7, 50])
def test_each_pass_has_every_input_once_in_an_order_of_its_own(
    size, opened, data, tokenizer_folder, tmp_path
):
    options = {"seq_len": SEQ_LEN, "vocab_size": 320}
    whole = Stream(load_documents([data], TextTokenizer(tokenizer_folder), **options), SEQ_LEN, 0)
    lines, files = Path(data).read_text().splitlines(True), (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    files[0].write_text("".join(lines[:20]))
    files[1].write_text("".join(lines[20:]))
    streamed = opened([str(file) for file in files], size)
    blocks = -(-50 // size)
    passes, rows = [[], []], []
    while streamed.position.epoch < 2 * blocks:
        rows = contents(streamed, streamed.take(1))
        if streamed.position.epoch < 2 * blocks:
            passes[streamed.position.epoch // blocks] += rows
    expected = contents(whole, whole.epoch(0))
    assert documents_of(passes[0]) == documents_of(passes[1]) == documents_of(expected)
    assert passes[0] != passes[1]
    assert (passes[0] == expected) == (size == 50)  # one block is an epoch
    assert len(streamed.documents.parts) <= 4 + SEQ_LEN // size  # used blocks are let go


def test_a_stream_goes_on_from_the_state_of_a_checkpoint(opened, data):
    streamed = opened([data, data], 9)
    for _ in range(5):
        streamed.take(3)
    place = streamed.position
    assert place.epoch >= 1
    state = json.loads(json.dumps(streamed.state(place)))
    fingerprint = streamed.documents.fingerprint()
    resumed = {"data": fingerprint, "position": place._asdict(), "stream": state}
    again = opened([data, data], 9, resumed, place)
    assert again.documents.fingerprint() == fingerprint
    for _ in range(40):  # into the second pass
        assert contents(again, again.take(1)) == contents(streamed, streamed.take(1))
        assert again.position == streamed.position
    other = opened([data, data], 10, resumed)  # another stream, which begins at its beginning
    assert other.documents.fingerprint() != fingerprint
    assert other.position == (0, 0)


def test_other_processes_read_the_blocks_of_the_one_that_makes_them(opened, data):
    maker = opened([data], 9)
    blocks = Blocks(opened.request([data]), 9, maker.blocks.folder, builds=False)
    documents = type(maker.documents)(list(maker.documents.parts))
    documents.blocks = blocks
    reader = BlockStream(documents, SEQ_LEN, 0)
    for _ in range(30):
        assert contents(maker, maker.take(2)) == contents(reader, reader.take(2))
    failed = []

    def wait():
        try:
            while True:
                reader.take(1)
        except Closed as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    blocks.closed.set()
    thread.join(20)
    assert failed


def of_hub(monkeypatch, records, shards=4):
    """Makes a data set of the hub, and the list of records that were read."""
    datasets = pytest.importorskip("datasets")
    read = []

    def generate(parts):
        for part in parts:
            for number in part:
                read.append(number)
                yield records[number]

    def load_dataset(repository, config, *, split, revision, streaming):
        assert (repository, split, revision, streaming) == ("owner/name", "train", "c0", True)
        parts = [list(range(n, len(records), shards)) for n in range(shards)]
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": parts})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(tables, "commit_of", lambda name: "c0")
    monkeypatch.setattr("liger_models.training.data.streaming.commit_of", lambda name: "c0")
    return read


def test_a_data_set_of_the_hub_is_not_read_again_up_to_the_place(monkeypatch, opened):
    records = [{"text": f"{number} " + "word " * 20} for number in range(80)]
    read = of_hub(monkeypatch, records)
    streamed = opened(["hf:owner/name"], 10)
    while streamed.position.epoch < 5:
        streamed.take(1)
    place, state = streamed.position, streamed.state(streamed.position)
    assert state["records"] == 50
    resumed = {"data": streamed.documents.fingerprint(), "position": place._asdict(), "stream": state}
    read.clear()
    again = opened(["hf:owner/name"], 10, json.loads(json.dumps(resumed)), place)
    for _ in range(20):
        assert contents(again, again.take(1)) == contents(streamed, streamed.take(1))
    assert not {number for number in read if number % 4 < 2} & set(read[:20])  # two shards were done


@pytest.mark.parametrize("objective", ["sft", "orpo"])
def test_a_run_over_one_block_is_that_over_a_corpus(objective, run, settings, losses, data, judged, tmp_path):
    files = (data if objective == "sft" else judged["pairs"],)
    options = {"data": files, "objective": objective, "eval_fraction": 0.0, "eval_every": 0, "save_every": 0}
    options |= {"seq_len": 128, "steps": 4, "batch_size": 8, "gradient_accumulation": 1}  # over an epoch
    streamed = settings(output=str(tmp_path / "streamed"), streaming=True, shuffle_buffer=100, **options)
    assert losses(run(streamed)) == losses(run(settings(**options)))


def test_a_streamed_run_resumes_to_the_bit(run, settings, losses, data, tmp_path):
    options = {"streaming": True, "shuffle_buffer": 5, "eval_fraction": 0.0, "eval_data": (data,)}
    options |= {"eval_tokens": 200, "keep": 0, "data_cache": str(tmp_path / "cache")}
    whole = run(settings(**options))
    again = run(settings(resume=str(whole.checkpoints[1]), **options))
    assert losses(again) == losses(whole)
    assert not list((tmp_path / "cache" / "streams").glob("*/*"))
    with pytest.raises(DataError, match="other tokens than these: shuffle_buffer=6, which was 5"):
        run(settings(resume=str(whole.checkpoints[0]), **options | {"shuffle_buffer": 6}))


def test_a_run_that_fails_before_its_first_step_leaves_no_blocks(run, settings, data, tmp_path):
    options = {"streaming": True, "shuffle_buffer": 5, "eval_fraction": 0.0, "data_cache": str(tmp_path)}
    with pytest.raises(DataError, match="nowhere"):
        run(settings(eval_data=(str(tmp_path / "nowhere.jsonl"),), **options))
    assert not list((tmp_path / "streams").glob("*/*"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"steps": None, "epochs": 1}, "streaming needs steps"),
        ({"eval_fraction": 0.1}, "pass eval_data, such as another split"),
        ({"objective": "dpo"}, "whose reference scores all data before the run"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
    ],
)
def test_settings_that_a_stream_cannot_have_are_refused(settings, options, error):
    with pytest.raises(ConfigError, match=error):
        settings(**{"streaming": True, "eval_fraction": 0.0} | options)


def test_data_that_cannot_be_streamed_are_refused(opened, data, tmp_path):
    for names, error in (
        ([f"0.5={data}", f"0.5={data}"], "cannot have weights"),
        (["-"], "standard input cannot be streamed"),
        ([str(tmp_path / "nothing.jsonl")], "is empty"),
    ):
        (tmp_path / "nothing.jsonl").write_text("")
        with pytest.raises(DataError, match=error):
            opened(names, 9)
    useless = tmp_path / "useless.jsonl"
    useless.write_text('{"text": ""}\n' * 20)
    with pytest.raises(DataError, match="nothing to train on"):
        opened([str(useless)], 9)
