"""Data pipeline: sources -> records -> corpus -> documents -> units in a random order -> rows -> batches.

No token is lost, and the seed fixes every random choice. May import `corpora`, `reading`, the text package
and images; knows no model, objective or loop.
"""

from liger_models.training.data.ahead import ahead
from liger_models.training.data.documents import IGNORE, Counts, Documents, describe, split
from liger_models.training.data.groups import GroupBatch, Groups
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.preview import Shown, pieces_of_text, preview_records, preview_rows
from liger_models.training.data.reading.records import TRAIN_ON
from liger_models.training.data.reading.schema import LABELLED, PAIRS
from liger_models.training.data.steps import StepData, read_steps
from liger_models.training.data.stream import START, Position, Stream
from liger_models.training.data.streaming import BlockRequest, BlockStream, stream_documents, stream_folder
from liger_models.training.data.tokenizing import build_corpus, load_documents

__all__ = [
    "IGNORE",
    "LABELLED",
    "PAIRS",
    "START",
    "TRAIN_ON",
    "BlockRequest",
    "BlockStream",
    "Counts",
    "Documents",
    "GroupBatch",
    "Groups",
    "Piece",
    "Position",
    "Row",
    "Shown",
    "StepData",
    "Stream",
    "ahead",
    "build_corpus",
    "describe",
    "load_documents",
    "pieces_of_text",
    "preview_records",
    "preview_rows",
    "read_steps",
    "split",
    "stream_documents",
    "stream_folder",
]
