"""Tokenization of sources to a cached corpus, keyed by sources, tokenizer and options.

Records are tokenized in batches of bounded size by the tokenizer's own threads while the previous batch is
written. Memory holds two batches (and the longest single record).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError
from liger_models.convert.host import lock
from liger_models.images import Preprocessor
from liger_models.layers.specs import TiledVisionSpec
from liger_models.training.data.ahead import ahead
from liger_models.training.data.building import CorpusBuilder
from liger_models.training.data.corpora.corpus import SHARD_TOKENS, Corpus, Limits, is_corpus
from liger_models.training.data.corpora.writing import written_corpus
from liger_models.training.data.documents import Documents, Part, describe
from liger_models.training.data.encoding import Encoder
from liger_models.training.data.groups import Groups
from liger_models.training.data.pictured import PicturedEncoder
from liger_models.training.data.reading.lines import Advance
from liger_models.training.data.reading.records import TRAIN_ON, Record
from liger_models.training.data.reading.schema import FORMS, LABELLED, PAIRS, Schema, parse_columns
from liger_models.training.data.reading.sources import STDIN, Source, find_sources, split_weights, with_split
from liger_models.training.text.tokenizer import TextTokenizer


def load_documents(
    data: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    seq_len: int,
    vocab_size: int,
    truncate: bool = False,
    train_on: str = TRAIN_ON[0],
    cache: str | Path | None = None,
    verify: bool = False,
    images: Preprocessor | None = None,
    form: str | None = None,
    share: bool = False,
    columns: str | None = None,
    split: str | None = None,
) -> Documents:
    """Load the documents of `data` (sources.py), or of corpora that `tokenize` wrote.

    All of a text is trained on; with a prompt, only the completion or the assistant's turns. Text of any
    length is cut into rows. An example with a prompt must fit in `seq_len`, unless `truncate` allows cutting
    it. An end-of-sequence token closes each text and completion. Unknown fields are ignored and counted.

    With `form`, PAIRS or LABELLED, all records must have that form, and each makes a group of two sequences
    in one row (groups.py): a prompt with both answers; or a prompt with its answer and, for KTO's KL
    estimate, with the previous record's answer. `truncate` cuts each at half of `seq_len`.

    `train_on` selects the answers of a conversation: "all", the "last", or "each" as a separate example,
    rendered as at inference. An example that is a prefix of another is merged with it. With `share`, which
    some models do not support (`inputs.can_share_prompts`), a row holds the common beginning of a
    conversation's examples once (trees.py).

    Unchanged data is read from `cache` (default: liger_models/data in the user's cache folder). One process
    builds it while others wait. `verify` recomputes digests: damaged corpora are rebuilt in the cache, and
    refused if given by name.

    `columns` names the data's columns where they differ from the fields, as in
    "prompt=question,completion=answer", and `split` the split of hub data sets that name none.

    `images` is for vision-language models: images are preprocessed once, in worker processes if many, and
    stored with the tokens.

    Raises DataError, with file and line, for unusable data: a missing or empty file, an unknown suffix, text
    that is not UTF-8, an unknown record form, a token outside `vocab_size`, an example that is too long, or
    no trainable token.
    """
    names, weights = split_weights(data)
    names = with_split(names, split)
    limits = limits_of(vocab_size, seq_len, form)
    folder = local_path(cache, DataError) if cache else default_cache()
    corpora = []
    for group in _groups(names, apart=weights is not None):
        path = local_path(group[0], DataError)
        if is_corpus(path):
            corpora.append(_made_before(path, tokenizer, verify, images, form, train_on, share))
        else:
            request = Request(group, tokenizer, limits, truncate, images, form, train_on, share, columns)
            corpora.append(request.find_or_build(folder / request.key(), verify))
        corpora[-1].check(limits)
    shares: Sequence[float | None] = weights or [None] * len(corpora)
    parts = [Part(corpus, share) for corpus, share in zip(corpora, shares, strict=True)]
    return (Documents if form is None else Groups)(parts, None if images is None else images.spec.vision)


def limits_of(vocab_size: int, seq_len: int, form: str | None) -> Limits:
    of_what = {PAIRS: ", its two answers with their prompts,", LABELLED: ", the answer and another one,"}
    return Limits(vocab_size, seq_len, of_what.get(form or "", ""))


def build_corpus(
    folder: str | Path,
    data: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    seq_len: int,
    vocab_size: int,
    truncate: bool = False,
    train_on: str = TRAIN_ON[0],
    shard_tokens: int = SHARD_TOKENS,
    images: Preprocessor | None = None,
    form: str | None = None,
    share: bool = False,
    columns: str | None = None,
    split: str | None = None,
) -> Corpus:
    """Tokenize `data` into `folder`, for use with `load_documents`.

    Raises DataError as `load_documents`, and if `folder` holds anything but a corpus.
    """
    path = local_path(folder, DataError)
    if path.exists() and not is_corpus(path) and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} holds something other than a corpus; choose another folder")
    names, weights = split_weights(data)
    names = with_split(names, split)
    if weights:
        raise DataError("a corpus is one part of a mixture, but its data have weights; pass them to train")
    if made := [name for name in names if is_corpus(local_path(name, DataError))]:
        raise DataError(f"{made[0]} is a corpus already; pass it to train with the others")
    limits = limits_of(vocab_size, seq_len, form)
    Request(names, tokenizer, limits, truncate, images, form, train_on, share, columns).build(
        path, shard_tokens
    )
    return Corpus(path)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger_models" / "data"


def _groups(names: list[str], apart: bool) -> list[list[str]]:
    """Group names by corpus: all raw sources together, or each name by itself if they have weights."""
    if apart:
        return [[name] for name in names]
    made = [name for name in names if is_corpus(local_path(name, DataError))]
    raw = [name for name in names if name not in made]
    return [raw] * bool(raw) + [[name] for name in made]


def _made_before(
    folder: Path,
    tokenizer: TextTokenizer,
    verify: bool,
    images: Preprocessor | None,
    form: str | None,
    train_on: str,
    share: bool,
) -> Corpus:
    corpus = Corpus(folder, verify)
    if corpus.form != form:
        found, wanted = (", ".join(FORMS) if f is None else f for f in (corpus.form, form))
        raise DataError(
            f"{folder} was made of records with {found}, and this objective reads {wanted}; tokenize the "
            "data again for this objective"
        )
    made_for = corpus.manifest["options"].get("train_on", TRAIN_ON[0])
    if made_for != train_on:
        raise DataError(
            f"{folder} was made with --train-on {made_for} and this run asks for {train_on}; tokenize the "
            "data again, or use that setting"
        )
    if len(corpus.branches) and not share:
        raise DataError(
            f"{folder} was made with prompts that several answers share, which this model, its attention "
            "backend or --sequence-parallel does not allow; pass the original data"
        )
    if corpus.manifest["tokenizer"] != tokenizer.digest():
        raise DataError(
            f"{folder} was made with a different tokenizer than that of {tokenizer.folder}; tokenize the "
            "data again with this one"
        )
    if corpus.has_images and (images is None or corpus.manifest["processor"] != images.digest()):
        raise DataError(
            f"{folder} has images, and they were made "
            + (
                "for a model that sees"
                if images is None
                else "by another processor, or another version of it"
            )
            + "; tokenize the data again for this model"
        )
    return corpus


class NothingToTrain(DataError):
    """The data have no document with a trained token."""


class Request:
    """Request for a corpus of all sources that `names` match."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: TextTokenizer,
        limits: Limits,
        truncate: bool,
        images: Preprocessor | None = None,
        form: str | None = None,
        train_on: str = TRAIN_ON[0],
        share: bool = False,
        columns: str | None = None,
    ) -> None:
        if form is not None and train_on != TRAIN_ON[0]:
            raise DataError(f"train_on is {train_on!r}, and records of {form} have no answers to choose from")
        self.train_on = train_on
        self.names, self.tokenizer, self.limits = list(names), tokenizer, limits
        self.images, self.form = images, form
        forms = FORMS if form is None else (form,)
        self.schema = Schema(forms, parse_columns(columns), tokenizer.has_chat_template)
        # With cross-attention to images, the tokens of a branch would have none to attend to.
        tiled = images is not None and isinstance(images.spec.vision, TiledVisionSpec)
        self.trees = share and train_on == "each" and not tiled
        self.length = limits.seq_len if truncate else None  # cut longer examples
        self.counts: Counter[str] = Counter()
        self.sources = [source for name in names for source in find_sources(name, self.counts)]

    def key(self) -> str:
        """Name of its cache folder, which does not change when the data does."""
        names = [source.full_name() for source in self.sources]
        return hashlib.sha256(json.dumps([self._about(), names]).encode()).hexdigest()[:32]

    def find_or_build(self, folder: Path, verify: bool = False) -> Corpus:
        """Return the corpus in `folder`, rebuilt unless it is complete and matches the current sources.

        Raises:
            DataError: the data is unusable, or the folder cannot be written.
        """
        with _locked(folder):
            if is_corpus(folder):
                with contextlib.suppress(DataError):  # rebuild a damaged corpus
                    corpus = Corpus(folder, verify)
                    if self._is_of(corpus.manifest):
                        return corpus
            self.build(folder)
            return Corpus(folder)

    def build(self, folder: Path, shard_tokens: int = SHARD_TOKENS) -> None:
        identities = self._identities()
        # Ids of special tokens may exceed the vocabulary size that a tokenizer reports.
        size = max(self.tokenizer.vocab_size, (self.tokenizer.eos_id or 0) + 1)
        with (
            written_corpus(folder, size, shard_tokens, self.form) as writer,
            self._bar() as advance,
            PicturedEncoder(self.tokenizer, self.images) as pictured,
        ):
            read = Counter(self.counts)  # counted in another thread
            encoder = Encoder(self.tokenizer, pictured, self.train_on)
            builder = CorpusBuilder(self.tokenizer, self.limits, self.length, writer, self.trees)
            for batch in ahead(encoder.encode(self._records(read, advance))):
                builder.add(batch)
            writer.counts = read + writer.counts + encoder.counts
            for source, identity in zip(self.sources, identities, strict=False):
                if source.identity(identity) != identity:
                    raise DataError(f"{source.name} changed while it was read; tokenize it again")
            if writer.documents == 0:
                raise NothingToTrain(
                    f"nothing to train on in {', '.join(self.names)}: {describe(writer.counts)}"
                )
            writer.about = {**self._about(), "sources": identities, "image files": pictured.files()}

    def _identities(self) -> list[dict[str, Any]]:
        return [source.identity() for source in self.sources]

    def _about(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer.digest(),
            "processor": None if self.images is None else self.images.digest(),
            "options": {"truncate": self.length, "train_on": self.train_on}
            | ({"form": self.form} if self.form else {})
            | ({"columns": sorted(map(list, self.schema.columns))} if self.schema.columns else {})
            | ({"trees of": self.limits.seq_len} if self.trees else {}),
        }

    def _is_of(self, manifest: dict[str, Any]) -> bool:
        if any(manifest[key] != value for key, value in self._about().items()):
            return False
        if any(source.name == STDIN for source in self.sources):
            return False
        # Keep the order of the names, from which the folder's name is derived.
        if len(manifest["sources"]) != len(self.sources):
            return False
        named = [Source(then["name"], Path(then["name"])) for then in manifest["image files"]]
        found = zip((*manifest["sources"], *manifest["image files"]), (*self.sources, *named), strict=True)
        try:
            return all({**then, "time": 0} == {**source.identity(then), "time": 0} for then, source in found)
        except OSError:  # a missing image is reported when it is read
            return False

    def _records(self, counts: Counter[str], advance: Advance) -> Iterator[Record]:
        for source in self.sources:
            empty = True
            for record in source.records(counts, advance, self.schema):
                empty = False
                yield record
            if empty:
                raise DataError(f"{source.name} is empty; expected text or records")

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Advance]:
        from liger_models.convert.progress import ProgressBar

        files = all(source.path for source in self.sources)
        with ProgressBar(
            desc="tokenizing",
            total=sum(source.size() for source in self.sources) if files else None,
            unit="B" if files else "row",
            unit_scale=True,
            delay=1,
        ) as bar:
            yield bar.update


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive file lock, which is released if the process dies."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot be written ({error.strerror}); name another folder with --data-cache"
        ) from error
    try:
        with contextlib.suppress(OSError):  # no file locks: each process builds, the last wins
            lock(handle)
        yield
    finally:
        os.close(handle)
