"""Sources to a corpus, once: built where there is none of the same sources, tokenizer and options.

Records are read and tokenized in batches of bounded size, by the tokenizer's own threads, while the batch
before is appended to files; what is held at any time is two batches (and the longest single record).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError
from liger_models.images import Preprocessor
from liger_models.layers.specs import TiledVisionSpec
from liger_models.training.data.ahead import ahead
from liger_models.training.data.building import CorpusBuilder
from liger_models.training.data.corpora.corpus import SHARD_TOKENS, Corpus, Limits, is_corpus
from liger_models.training.data.corpora.writing import written_corpus
from liger_models.training.data.documents import Documents, Part, describe
from liger_models.training.data.encoding import Encoder
from liger_models.training.data.groups import Groups
from liger_models.training.data.lines import Advance
from liger_models.training.data.pictured import PicturedEncoder
from liger_models.training.data.records import FORMS, LABELLED, PAIRS, TRAIN_ON, Record
from liger_models.training.data.sources import STDIN, Source, find_sources, split_weights
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
) -> Documents:
    """The documents of what `data` names (see sources.py), or of corpora that `tokenize` made.

    Text is trained throughout; where there is a prompt, only the completion or what the assistant says. Text
    of any length is cut into rows; an example with a prompt must fit in `seq_len`, or `truncate` says to cut
    it. An end-of-sequence token closes each text and completion. Other fields of a record are left aside and
    counted.

    With `form`, PAIRS or LABELLED, records are of that form alone, and each makes a group of two sequences,
    which stay together in a row (groups.py): the two answers with their prompt; or the answer, and for KTO's
    estimate of a divergence the prompt with the answer of the record before. `truncate` cuts each at half of
    `seq_len`.

    `train_on` says which answers of a conversation are learned: "all", the "last", or "each" in an example of
    its own, rendered as the conversation is when the model is asked. Where one example begins with another,
    the two are one. With `share`, which not every model can take (`inputs.can_share_prompts`), what examples
    of one conversation begin with stands in a row once (trees.py).

    What was tokenized before, and has not changed since, is taken from `cache` (default: liger_models/data
    in the user's folder of caches). Of several processes the first to come builds it, and the others wait.
    With `verify`, digests of what was tokenized before are computed anew: a corpus in the cache that is
    damaged is made again, and one that was named is refused.

    `images` is of a model that sees: images in conversations are preprocessed once, in other processes where
    they are many, and lie beside the tokens.

    Raises DataError, with file and line, for what cannot be used: a missing or empty file, an unknown
    suffix, text that is not UTF-8, a record of no known form, a token outside `vocab_size`, an example that
    is too long, and for data in which nothing can be trained.
    """
    names, weights = split_weights(data)
    limits = limits_of(vocab_size, seq_len, form)
    folder = local_path(cache, DataError) if cache else default_cache()
    corpora = []
    for group in _groups(names, apart=weights is not None):
        path = local_path(group[0], DataError)
        if is_corpus(path):
            corpora.append(_made_before(path, tokenizer, verify, images, form, train_on, share))
        else:
            request = Request(group, tokenizer, limits, truncate, images, form, train_on, share)
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
) -> Corpus:
    """Tokenize what `data` names into `folder`, which may be given to `load_documents`.

    Raises DataError as that does, and where `folder` holds something else than a corpus.
    """
    path = local_path(folder, DataError)
    if path.exists() and not is_corpus(path) and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} holds something else than a corpus; name another folder")
    names, weights = split_weights(data)
    if weights:
        raise DataError("a corpus is one part of a mixture, and its data have weights; give them to train")
    if made := [name for name in names if is_corpus(local_path(name, DataError))]:
        raise DataError(f"{made[0]} is a corpus already; give it to train beside others")
    limits = limits_of(vocab_size, seq_len, form)
    Request(names, tokenizer, limits, truncate, images, form, train_on, share).build(path, shard_tokens)
    return Corpus(path)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger_models" / "data"


def _groups(names: list[str], apart: bool) -> list[list[str]]:
    """What is tokenized together: all that needs it, unless each has a weight of its own."""
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
            f"{folder} was made of records with {found}, and this objective reads {wanted}; tokenize such "
            "data with the objective that it is for"
        )
    made_for = corpus.manifest["options"].get("train_on", TRAIN_ON[0])
    if made_for != train_on:
        raise DataError(
            f"{folder} was made with --train-on {made_for} and this run asks for {train_on}; tokenize the "
            "data again, or ask for what it was made with"
        )
    if len(corpus.branches) and not share:
        raise DataError(
            f"{folder} was made with prompts that several answers share, which this model, its attention "
            "backend or --sequence-parallel does not allow; give the data that it was made of"
        )
    if corpus.manifest["tokenizer"] != tokenizer.digest():
        raise DataError(
            f"{folder} was made with another tokenizer than that of {tokenizer.folder}; tokenize the data "
            "again with this one"
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


class Request:
    """A corpus of all that `names` mean."""

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
    ) -> None:
        if form is not None and train_on != TRAIN_ON[0]:
            raise DataError(f"train_on is {train_on!r}, and records of {form} have no answers to choose from")
        self.train_on = train_on
        self.names, self.tokenizer, self.limits = list(names), tokenizer, limits
        self.images, self.form = images, form
        # Where tokens of text look at images beside it, those of a branch would be shown none.
        tiled = images is not None and isinstance(images.spec.vision, TiledVisionSpec)
        self.trees = share and train_on == "each" and not tiled
        self.length = limits.seq_len if truncate else None  # longer examples are cut
        self.counts: Counter[str] = Counter()
        self.sources = [source for name in names for source in find_sources(name, self.counts)]

    def key(self) -> str:
        """The name of its folder in a cache: that of the same data, whatever has changed in it since."""
        names = [source.full_name() for source in self.sources]
        return hashlib.sha256(json.dumps([self._about(), names]).encode()).hexdigest()[:32]

    def find_or_build(self, folder: Path, verify: bool = False) -> Corpus:
        """The corpus in `folder`, built anew unless it is whole, and that of these sources as they are.

        Raises:
            DataError: the data cannot be used, or the folder not be written.
        """
        with _locked(folder):
            if is_corpus(folder):
                with contextlib.suppress(DataError):  # a damaged one is built again
                    corpus = Corpus(folder, verify)
                    if self._is_of(corpus.manifest):
                        return corpus
            self.build(folder)
            return Corpus(folder)

    def build(self, folder: Path, shard_tokens: int = SHARD_TOKENS) -> None:
        identities = [source.identity() for source in self.sources]
        # Ids of special tokens may lie beyond the vocabulary that a tokenizer tells.
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
            writer.counts = read + writer.counts
            for source, identity in zip(self.sources, identities, strict=True):
                if source.identity(identity) != identity:
                    raise DataError(f"{source.name} changed while it was read; tokenize it again")
            if writer.documents == 0:
                raise DataError(f"nothing to train on in {', '.join(self.names)}: {describe(writer.counts)}")
            writer.about = {**self._about(), "sources": identities, "image files": pictured.files()}

    def _about(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer.digest(),
            "processor": None if self.images is None else self.images.digest(),
            "options": {"truncate": self.length, "train_on": self.train_on}
            | ({"form": self.form} if self.form else {})
            | ({"trees of": self.limits.seq_len} if self.trees else {}),
        }

    def _is_of(self, manifest: dict[str, Any]) -> bool:
        if any(manifest[key] != value for key, value in self._about().items()):
            return False
        if any(source.name == STDIN for source in self.sources):
            return False
        # The order is that of the names, which the folder's name stands for.
        if len(manifest["sources"]) != len(self.sources):
            return False
        named = [Source(then["name"], Path(then["name"])) for then in manifest["image files"]]
        found = zip((*manifest["sources"], *manifest["image files"]), (*self.sources, *named), strict=True)
        try:
            return all({**then, "time": 0} == {**source.identity(then), "time": 0} for then, source in found)
        except OSError:  # an image is no longer there, which is told when it is asked for
            return False

    def _records(self, counts: Counter[str], advance: Advance) -> Iterator[Record]:
        for source in self.sources:
            empty = True
            for record in source.records(counts, advance, (self.form,) if self.form else FORMS):
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
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # in a log file every redraw is a line
            dynamic_ncols=True,
        ) as bar:
            yield bar.update


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait. The lock dies with its process."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot be written ({error.strerror}); name another folder with --data-cache"
        ) from error
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks: each builds, and the last one stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
