"""Images of one's own: a folder with one folder of pictures for each class, or an .npz file of two arrays.

Pictures that are to be judged need no labels: they may lie in the folder itself.

Messages name the folder that was given, and no file in it: a file's name (a patient's number, say) and the place of the one that
can't be read are private. :func:`unreadable_pictures` tells whoever holds the pictures.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from lipdp._checks import discreet
from lipdp.errors import DataError, LipdpWarning

_KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_NAMES = {"images": ("images", "x", "X", "data"), "labels": ("labels", "y", "targets")}
_SIDE = 32  # what pictures of several sizes are brought to

Array = npt.NDArray[Any]
Place = str | os.PathLike[str]


@discreet
def read_images(path: Place, *, side: int | None = None) -> tuple[Array, Array]:
    """(images, labels) of a folder or a file.

    A folder holds one folder for each class, named by its label, with pictures in it; they are grey where all of them are, and
    brought to 32 × 32 pixels where they differ in size. A file of :func:`numpy.savez` holds ``images`` (or x) and ``labels`` (or
    y).

    Each picture is read by itself: turned as its camera says, what is transparent on white, 16 bits as 8. What is passed over
    (an empty folder, a file of another kind) is told by a warning.

    Args:
        path: of the folder or the .npz file.
        side: bring every picture of a folder to this many pixels along each side, whatever the others are.
    """
    labels = read_labels(path)
    return read_pictures(path, side=side), labels


def has_labels(path: Place) -> bool:
    """Whether pictures lie in folders of their classes, or an .npz file holds labels beside them.

    Args:
        path: of the folder or the .npz file.
    """
    place = Path(path)
    if place.is_dir():
        return bool(_labelled(place))
    return bool(set(_names_in(place)) & set(_NAMES["labels"]))


def picture_files(path: Place) -> list[Path]:
    """The pictures of a folder in the order in which they are read: by class and name, or by name where no folders of classes are.

    Args:
        path: of the folder.
    """
    return _labelled(Path(path)) or _pictures_in(Path(path))


@discreet
def read_labels(path: Place) -> Array:
    """The labels alone, in the order of :func:`read_images`; no picture is opened.

    Args:
        path: of the folder or the .npz file.
    """
    place = Path(path)
    if not place.is_dir():
        return _stored(place, "labels")
    files = _labelled(place)
    if not files:
        deeper = any(_labelled(part) for part in _folders_in(place))
        hint = ". One of its folders holds such folders (training and test pictures?): give that one" if deeper else ""
        raise DataError(f"'{place}' holds no pictures in folders, one for each class: {place.name}/LABEL/picture.png{hint}")
    _tell_passed_over(place)
    return np.array([file.parent.name for file in files])


@discreet
def read_pictures(path: Place, shape: tuple[int, ...] | None = None, *, side: int | None = None) -> Array:
    """The images alone; in a folder without folders of classes, the pictures in it by name.

    Args:
        path: of the folder or the .npz file.
        shape: (channels, height, width) that pictures of a folder are brought to, each by itself; by default they stay as they
            are where all are alike, see :func:`read_images`.
        side: as shape, of both sides; grey or colour is as found.
    """
    place = Path(path)
    if not place.is_dir():
        return _stored(place, "images")
    files = picture_files(place)
    if not files:
        raise DataError(f"'{place}' holds no pictures ({', '.join(kind[1:] for kind in _KINDS)})")
    mode = None if shape is None else "L" if shape[0] == 1 else "RGB"
    size = (shape[2], shape[1]) if shape is not None else None if side is None else (side, side)
    opened = [_opened(file, mode, size) for file in files]
    if any(several for _, several in opened):
        warnings.warn(
            f"'{place}' holds pictures of several frames or pages (animations, scans): the first of each counts, the others are "
            "passed over.",
            LipdpWarning,
            stacklevel=3,
        )
    pictures = [picture for picture, _ in opened]
    if mode is None:
        mode = "L" if all(picture.mode == "L" for picture in pictures) else "RGB"
    if size is None:
        size = pictures[0].size if len({picture.size for picture in pictures}) == 1 else (_SIDE, _SIDE)
    return np.stack([np.asarray(_as(picture, mode, size)) for picture in pictures])


def unreadable_pictures(path: Place) -> list[Path]:
    """The files of a folder that can't be read as pictures. For whoever holds them: what they are called may be private.

    Args:
        path: of the folder.
    """
    place = Path(path)
    broken = []
    for file in picture_files(place):
        try:
            _opened(file, None, None)
        except DataError:
            broken.append(file)
    return broken


@contextmanager
def _in_silence() -> Iterator[None]:
    """Pillow warns of, and logs, what stands in a file (its tags, its comments)."""
    log = logging.getLogger("PIL")
    before = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(before)


def _opened(file: Path, mode: str | None, size: tuple[int, int] | None) -> tuple[Any, bool]:
    """A picture of Pillow, grey ("L") or in colour ("RGB"), and whether the file holds others behind it."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(
            "pictures are read by the package Pillow, which is not installed: pip install pillow, or give an .npz"
        ) from None
    try:
        with _in_silence(), Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened)  # a copy: what is asked next moves in the file
            several = _holds_others(opened)
            if picture.mode[0] in "IF":  # 16 bits, or 32 that hold them, or floating point: from 0 to 1 where none is larger
                values = np.asarray(picture)
                if not np.isfinite(values).all():
                    raise ValueError
                values = (values * (255 if picture.mode == "F" and values.max() <= 1 else 1)).astype(np.int64)
                picture = Image.fromarray((values.clip(0, 65535) // 257 if values.max() > 255 else values.clip(0)).astype(np.uint8))
            elif picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                grey = picture.mode == "LA"
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
                picture = picture.convert("L" if grey else "RGB")
            return _as(picture, mode or ("L" if picture.mode in ("1", "L") else "RGB"), size or picture.size), several
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises whatever a damaged file leads it to
        raise DataError(
            f"a picture in the folder can't be read ({type(error).__name__}: damaged, of another kind than its name says, or "
            "far too large). lipdp.data.unreadable_pictures(folder) lists such files, for you alone: repair them, or take them out"
        ) from None


def _holds_others(opened: Any) -> bool:
    """Whether there are pictures behind the first one. What a telephone puts there (MPO: a preview, a map of light) is none."""
    try:
        return opened.format != "MPO" and bool(getattr(opened, "is_animated", False))
    except Exception:  # damaged behind the first one, which is read
        return False


def _as(picture: Any, mode: str, size: tuple[int, int]) -> Any:
    from PIL import Image

    picture = picture if picture.mode == mode else picture.convert(mode)
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BILINEAR)


def _tell_passed_over(place: Path) -> None:
    """Say what a folder of classes holds that is not read: nothing is left out in silence."""
    folders = _folders_in(place)
    empty = [part.name for part in folders if not _pictures_in(part)]
    loose = [file for file in _pictures_in(place) if file.is_file()]
    others = [
        file
        for part in folders
        for file in part.iterdir()
        if (file.is_dir() or file.suffix.lower() not in _KINDS) and not file.name.startswith(".") and file.name != "Thumbs.db"
    ]
    told = [
        *([f"{len(empty)} folders without a picture: no such class is learned"] if empty else []),
        *([f"{len(loose)} pictures that lie in no folder of a class"] if loose else []),
        *([f"{len(others)} files or folders that are no pictures"] if others else []),
    ]
    if told:
        warnings.warn(f"'{place}' holds {'; '.join(told)}. They are passed over.", LipdpWarning, stacklevel=4)


def _pictures_in(place: Path) -> list[Path]:
    """What a system hides (._1.png of a Mac's archive, folders of an editor) is nobody's picture, and no class."""
    return sorted(file for file in place.iterdir() if file.suffix.lower() in _KINDS and not _is_hidden(file))


def _folders_in(place: Path) -> list[Path]:
    return sorted(part for part in place.iterdir() if part.is_dir() and not _is_hidden(part))


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__MACOSX"


def _labelled(place: Path) -> list[Path]:
    """Pictures in folders of their classes, by label and name."""
    return [file for part in _folders_in(place) for file in _pictures_in(part)]


def _stored(place: Path, what: str) -> Array:
    """One of the two arrays of an .npz file."""
    names = _names_in(place)
    name = next((name for name in _NAMES[what] if name in names), None)
    if name is None:
        raise DataError(f"'{place}' holds {', '.join(names)}, and no array {' or '.join(_NAMES[what])}")
    return np.asarray(_from_file(place, name))


def _names_in(place: Path) -> list[str]:
    if place.suffix != ".npz" or not place.is_file():
        kind = {".npy": ". Give the array itself, numpy.load(…)", ".zip": ". Unpack it"}.get(place.suffix, "")
        raise DataError(f"'{place}' is neither a folder of pictures nor an .npz file that is there{kind}")
    names: list[str] = _from_file(place, None)
    return names


def _from_file(place: Path, name: str | None) -> Any:
    """An array of an .npz file, or the names of all."""
    try:
        with np.load(place, allow_pickle=False) as stored:
            return list(stored.files) if name is None else stored[name]
    except (BadZipFile, ValueError, OSError, EOFError) as error:
        raise DataError(
            f"'{place}' can't be read ({type(error).__name__}): write plain arrays, numpy.savez('{place.name}', images=…, "
            "labels=…), labels as numbers or texts of one type (dtype=object needs pickle, which is not read)"
        ) from None
