"""Texts as numbers by public rules: nothing is learned from them, so nothing is released. Words in a bag, letters in windows.

And IMDB's reviews (two classes), as sequences of hashed words. A vocabulary that is built from the training text is a release:
whether a rare word has a number tells that somebody wrote it. So no vocabulary is built. A word's number is a public hash of it,
the same on every machine and for every dataset; words that share a bucket share an embedding.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lipdp._checks import whole
from lipdp._files import PUBLIC, written_whole
from lipdp.data.files import Availability, DatasetInfo, Loaded, RemoteFile, data_root, ensure
from lipdp.errors import ConfigurationError, DataError

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_TAG = re.compile(r"<[^>]*>")

_COMMON = """
    a about all also an and are as at be because been but by can do does for from had has have he her him his how i if in into is it
    it's its just me more my of on one only or other out over s she so some than that the their them then there these they this to
    up us was we were what when which who with would you your
"""
COMMON_WORDS = frozenset(_COMMON.split())
"""English words that say little by themselves."""


def words(text: str) -> Iterator[str]:
    """Runs of letters and digits, lower case, inner apostrophes kept; mark-up in angle brackets is left out."""
    return (word.group() for word in _WORD.finditer(_TAG.sub(" ", text).lower()))


def hashed_word(word: str) -> int:
    """A number of 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def hashed_bag(texts: Sequence[str], buckets: int = 16_384, *, leave_out: Collection[str] = COMMON_WORDS) -> torch.Tensor:
    """Texts as vectors (len(texts), buckets) of norm 1: which words are in them, by a public hash.

    Every different word of a text adds +1 or −1, by a bit of its hash, to the entry that its hash names: words that share a bucket
    cancel as often as they add, so products of vectors are those of the sets of words on average. A text without words is 0. A
    vocabulary would be learned from the texts and have to be paid for; a hash knows nothing of them.

    Args:
        texts: as they are.
        buckets: entries of a vector.
        leave_out: words that are not looked at; a public list.

    Example:
        >>> vectors = hashed_bag(["A great film", "great, GREAT film!", "dull"], buckets=64)
        >>> bool(torch.equal(vectors[0], vectors[1])), round(float(vectors[2].norm()), 3)
        (True, 1.0)
    """
    if isinstance(texts, str):
        raise ConfigurationError("texts is one string: pass a list of texts")
    whole("buckets", buckets, least=2)
    vectors = torch.zeros(len(texts), buckets)
    known: dict[str, int] = {}
    left_out = frozenset(leave_out)
    for row, text in enumerate(texts):
        numbers = [known.setdefault(word, hashed_word(word)) for word in sorted(set(words(text)) - left_out)]
        places = torch.tensor([number % buckets for number in numbers], dtype=torch.long)
        signs = torch.tensor([1.0 - 2.0 * (number >> 63) for number in numbers])
        vectors[row].index_add_(0, places, signs)
    return torch.nn.functional.normalize(vectors, out=vectors)


def windows(text: str | bytes, length: int) -> torch.Tensor:
    """A text as records of ``length`` + 1 bytes (records, length + 1), one after another; a rest that is too short is left out.

    Of a record the first ``length`` bytes are the input and the last ``length`` the targets of next-letter training. Records share
    no byte, so that one record is what a guarantee by record protects: ``length`` + 1 letters, not a work nor its author.

    Args:
        text: letters (encoded as UTF-8) or bytes.
        length: of a record's input.

    Example:
        >>> windows("to be or not to be", 5).shape
        torch.Size([3, 6])
    """
    whole("length", length, least=1)
    numbers = torch.frombuffer(bytearray(text.encode() if isinstance(text, str) else text), dtype=torch.uint8).long()
    count = len(numbers) // (length + 1)
    if count == 0:
        raise ConfigurationError(f"the text has {len(numbers)} bytes, fewer than one record of {length} + 1")
    return numbers[: count * (length + 1)].reshape(count, length + 1)


BUCKETS = 16_384  # numbers that a word can have, the padding's 0 included
LENGTH = 256  # words of a review that are kept, from its beginning
_FIRST_POSITIVE = 7  # of ten stars; reviews with 5 and 6 are not in the dataset
_PARTS = ("train", "test")


class _Buckets(dict[str, int]):
    """Word → bucket, computed once for each word that is met."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __missing__(self, word: str) -> int:
        self[word] = 1 + hashed_word(word) % (self.count - 1)
        return self[word]


def hashed_words(texts: list[str], length: int = LENGTH, buckets: int = BUCKETS) -> torch.Tensor:
    """Texts as (len(texts), length) numbers: the first ``length`` words of each, hashed; 0 where a text has ended.

    Words are runs of letters and digits, lower case, inner apostrophes kept; mark-up in angle brackets is left out. The number
    of a word is 1 + blake2b(word) mod (buckets − 1): it depends on the word alone, so nothing is learned from the texts.

    Example:
        >>> hashed_words(["Great, GREAT film!", "Don't<br />miss it"], length=4)[0, :2].unique().numel()
        1
    """
    if length < 1 or buckets < 2:
        raise ConfigurationError(f"length must be at least 1 and buckets at least 2, not {length} and {buckets}")
    known = _Buckets(buckets)
    numbers = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in zip(numbers, texts, strict=True):
        numbers_of = [known[word] for word in islice(words(text), length)]
        row[: len(numbers_of)] = numbers_of
    return torch.from_numpy(numbers)


@dataclass(frozen=True)
class Reviews:
    """`train.tsv` and `test.tsv` (stars, a tab, the text; one review a line), or the publisher's archive to make them from."""

    info: DatasetInfo
    archive: RemoteFile

    def availability(self, root: Path) -> Availability:
        """On disk when both tables are, or the archive is."""
        folder = root / self.info.name
        on_disk = not self._absent(folder) or (folder / self.archive.name).is_file()
        return Availability(self.info.name, on_disk, folder)

    def load(self, root: Path, *, download: bool) -> Loaded:
        """As hashed words."""
        train, test = (TensorDataset(hashed_words(part, *self.info.shape), y) for part, y in self.texts(root, download=download))
        return train, test, self.info

    def texts(self, root: Path, *, download: bool) -> tuple[tuple[list[str], torch.Tensor], tuple[list[str], torch.Tensor]]:
        """Train and test, texts and labels. Fetched and unpacked if need be; of the tables no checksum is published: their content
        is checked.
        """
        folder = root / self.info.name
        if absent := self._absent(folder):
            archive = folder / self.archive.name
            note = f"(unpacked, it would be {', '.join(absent)} in {folder})"
            ensure(self.info.name, self.archive, archive, download=download, note=note)
            _unpack(archive, folder, absent)
        train, test = (self._read(folder / f"{part}.tsv", size) for part, size in zip(_PARTS, self._sizes, strict=True))
        return train, test

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.info.train_size, self.info.test_size

    @staticmethod
    def _absent(folder: Path) -> list[str]:
        return [f"{part}.tsv" for part in _PARTS if not (folder / f"{part}.tsv").is_file()]

    def _read(self, path: Path, size: int) -> tuple[list[str], torch.Tensor]:
        try:
            lines = path.read_bytes().decode("utf8").removesuffix("\n").split("\n")
            reviews = [(int(stars), text) for stars, text in (line.split("\t", 1) for line in lines)]
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise DataError(f"{self.info.name}: {path} can't be read ({error}). Delete it and load again.") from error
        stars = torch.tensor([review[0] for review in reviews])
        labels = (stars >= _FIRST_POSITIVE).long()
        if len(reviews) != size or 2 * int(labels.sum()) != size or not bool(((stars >= 1) & (stars <= 10)).all()):
            raise DataError(
                f"{self.info.name}: {path} holds {len(reviews)} reviews, {int(labels.sum())} of them with {_FIRST_POSITIVE} stars "
                f"or more, but {size} of 1 to 10 stars, half of each kind, should be there. Delete it and load again."
            )
        return [text for _, text in reviews], labels


def reviews(part: str, *, root: str | os.PathLike[str] | None = None, download: bool = True) -> tuple[list[str], torch.Tensor]:
    """The texts of IMDB's reviews as they were written, and their labels (1: positive).

    Args:
        part: "train" or "test", 25,000 each.
        root: as for :func:`lipdp.data.load`.
        download: fetch what is not there.
    """
    if part not in _PARTS:
        raise ConfigurationError(f"part must be 'train' or 'test', not {part!r}")
    return IMDB.texts(data_root(root), download=download)[_PARTS.index(part)]


def _unpack(archive: Path, folder: Path, names: list[str]) -> None:
    """The tables from the archive's files, one per review; each appears under its name only once complete."""
    try:
        tables: dict[str, list[tuple[str, int, str]]] = {name: [] for name in names}
        with tarfile.open(archive, "r:gz") as tar:
            for part, kind, number, review in _members(tar):
                if f"{part}.tsv" in tables:
                    tables[f"{part}.tsv"].append((kind, number, review))
        for name, reviews in tables.items():
            reviews.sort(key=lambda review: (review[0] != "pos", review[1]))
            with written_whole(folder / name, PUBLIC) as file:
                file.write("".join(f"{review}\n" for _, _, review in reviews).encode())
    except (tarfile.TarError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{archive} is corrupt ({error}). Delete it and load again.") from error
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked in {folder} ({error}). Make that folder writable.") from error


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, int, str]]:
    """(train or test, pos or neg, number, "stars<TAB>text") of the labelled reviews: aclImdb/train/pos/127_10.txt."""
    for member in tar:
        name = re.fullmatch(r"aclImdb/(train|test)/(pos|neg)/(\d+)_(\d+)\.txt", member.name)
        file = tar.extractfile(member) if name is not None else None
        if name is not None and file is not None:
            text = " ".join(file.read().decode("utf8").split("\n"))
            yield name[1], name[2], int(name[3]), f"{int(name[4])}\t{text}"


IMDB = Reviews(
    DatasetInfo(
        name="imdb",
        classes=2,
        shape=(LENGTH,),
        train_size=25_000,
        test_size=25_000,
        class_names=("negative", "positive"),
        licence="none stated by the authors, who ask to be cited",
        citation="A. L. Maas, R. E. Daly, P. T. Pham, D. Huang, A. Y. Ng and C. Potts. Learning Word Vectors for Sentiment "
        "Analysis. ACL 2011.",
        source="https://ai.stanford.edu/~amaas/data/sentiment/",
    ),
    RemoteFile(
        "aclImdb_v1.tar.gz",
        "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        ("https://ai.stanford.edu/~amaas/data/sentiment/",),
    ),
)
