"""Building of a corpus from ids and loss marks, with optional truncation and counts of likely mistakes."""

from __future__ import annotations

from liger_models.convert.errors import DataError
from liger_models.training.data.corpora.corpus import Extreme, Limits
from liger_models.training.data.corpora.learned_tokens import LAST
from liger_models.training.data.corpora.writing import CorpusWriter
from liger_models.training.data.encoding import Encoded
from liger_models.training.data.reading.records import Record
from liger_models.training.data.trees import Branch, trees_of
from liger_models.training.text.tokenizer import TextTokenizer


class CorpusBuilder:
    """Appends encoded records to a corpus, truncated to `length` tokens if given. With `trees`, examples of
    one conversation become documents of up to seq_len inputs that hold their common beginning once.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        limits: Limits,
        length: int | None,
        writer: CorpusWriter,
        trees: bool = False,
    ) -> None:
        self.tokenizer, self.limits, self.length = tokenizer, limits, length
        self.writer, self.trees = writer, trees
        self.examples: list[Branch] = []  # of the current conversation
        self.open = False  # whether a document is unfinished

    def add(self, batch: list[Encoded]) -> None:
        for encoded in batch:
            if encoded.group is not None:
                self._add_group(encoded, encoded.group)
                continue
            record, ids, trained, whole, more, images, needed = encoded[:7]
            together = self.trees and record.form == "messages"
            self._count_dropped(encoded)
            if not self.open:
                self._count_ends(record, ids, trained)
            if whole and self.length is not None and len(ids) > self.length + 1:
                _check_cut(record, needed, self.length, f"seq_len {self.length}")
                self.writer.counts["truncated"] += 1
                ids, trained = ids[: self.length + 1], trained[: self.length + 1]
            self._note_largest(record, ids)
            if whole:
                self.writer.note("example", Extreme(len(ids) - 1, record.where), self.limits)
            if not self.open and 1 not in trained:
                self.writer.counts["without anything to train, left out"] += 1
            else:
                self._note_learned(ids, trained, whole)
                if together:
                    last = max(needed, default=0)
                    self.examples.append(Branch(ids, trained, 0, images, record.images, last))
                else:
                    self.writer.extend(ids, trained)
                    self.open = more
                    if not more:
                        self.writer.end(whole, images)
                        self._count_images(record.images)
            if together and not record.examples_left:
                self._add_trees(record)

    def _add_trees(self, record: Record) -> None:
        """Add the examples of a conversation after its last record."""
        examples, self.examples = self.examples, []
        for tree in trees_of(examples, self.limits.seq_len + 1):
            for branch in tree:
                if branch.shared:
                    self.writer.branch(branch.shared)
                    self.writer.counts["tokens of shared prompts not repeated"] += branch.shared
                self.writer.extend(branch.ids, branch.trained)
            inputs = self.writer.stop - self.writer.start - 1
            self.writer.note("example", Extreme(inputs, record.where), self.limits)
            self.writer.end(True, tree[0].images)
            self._count_images(tree[0].pictures)

    def _add_group(self, encoded: Encoded, group: tuple[int, int]) -> None:
        record, ids, trained = encoded[:3]
        self._count_dropped(encoded)
        first, good = group
        halves = [(ids[:first], trained[:first]), (ids[first:], trained[first:])]
        if self.length is not None:
            half = self.length // 2
            _check_cut(record, encoded.needed, half, f"half of seq_len {self.length}")
            if any(len(ids) > half for ids, _ in halves):
                self.writer.counts["truncated"] += 1
            halves = [(ids[:half], trained[:half]) for ids, trained in halves]
        self._note_largest(record, ids)
        self.writer.note("example", Extreme(sum(len(ids) for ids, _ in halves), record.where), self.limits)
        if any(1 not in trained for _, trained in halves):
            self.writer.counts["without anything to train, left out"] += 1
            return
        if halves[0] == halves[1]:
            self.writer.counts["with two answers that are alike"] += 1
        for half_ids, half_trained in halves:
            self._note_learned(half_ids, half_trained, True)
            self.writer.extend(half_ids, half_trained)
        self.writer.end(True, encoded.images, (len(halves[0][0]), good))
        self._count_images(record.images)

    def _count_images(self, count: int) -> None:
        if count:
            self.writer.counts["images"] += count

    def _count_dropped(self, encoded: Encoded) -> None:
        for what in encoded.dropped:
            self.writer.counts[f"answers whose {what} the chat template leaves out"] += 1

    def _count_ends(self, record: Record, ids: list[int], trained: bytes) -> None:
        """Count endings that are allowed but likely mistakes."""
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            self.writer.counts["that begin with the token of a beginning twice"] += 1
        unended = _answers_without_end(ids, trained, self.tokenizer.special_ids)
        if record.form == "messages" and unended:
            self.writer.counts["answers without a token that ends them"] += unended

    def _note_learned(self, ids: list[int], trained: bytes, whole: bool) -> None:
        tokenizer = self.tokenizer
        self.writer.learned.note(ids, trained, tokenizer.special_ids, whole, tokenizer.added_ids)

    def _note_largest(self, record: Record, ids: list[int]) -> None:
        largest = max(ids, default=0)
        if largest > self.writer.extremes["token"].value:
            name = self.tokenizer.backend.id_to_token(largest) or ""
            self.writer.note("token", Extreme(largest, record.where, name), self.limits)


def _check_cut(record: Record, needed: tuple[int, ...], length: int, name: str) -> None:
    """Raise DataError if truncation to this length cuts off an image."""
    if needed and max(needed) > length:
        raise DataError(
            f"{record.where}: the example's last image ends at position {max(needed)}, and would be cut at "
            f"{name}; raise --seq-len, or take smaller images"
        )


def _answers_without_end(ids: list[int], trained: bytes, special: frozenset[int]) -> int:
    """Count the runs of trained tokens without a special token near the end, which do not teach to stop."""
    count, stop, marks = 0, 0, trained + b"\0"
    while stop := marks.find(b"\1\0", stop) + 1:
        start = max(marks.rfind(b"\0", 0, stop) + 1, stop - LAST)
        count += special.isdisjoint(ids[start:stop])
    return count
