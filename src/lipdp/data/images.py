"""Images of one's own: a folder with one folder of pictures for each class, or an .npz file of two arrays.

Pictures that are to be judged need no labels: they may lie in the folder itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from lipdp.errors import DataError

__all__ = ["read_images", "read_labels", "read_pictures"]

_KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_NAMES = {"images": ("images", "x", "X", "data"), "labels": ("labels", "y", "targets")}
_SIDE = 32  # what pictures of several sizes are brought to

Array = npt.NDArray[Any]
Place = str | os.PathLike[str]


def read_images(path: Place) -> tuple[Array, Array]:
    """(images, labels) of a folder or a file.

    A folder holds one folder for each class, named by its label, with pictures in it; they are grey where all of them are, and
    brought to 32 × 32 pixels where they differ in size. A file of :func:`numpy.savez` holds ``images`` (or x) and ``labels`` (or
    y).

    Args:
        path: of the folder or the .npz file.
    """
    labels = read_labels(path)
    return read_pictures(path), labels


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
        raise DataError(f"'{place}' holds no pictures in folders, one for each class: {place.name}/LABEL/picture.png")
    return np.array([file.parent.name for file in files])


def read_pictures(path: Place, shape: tuple[int, ...] | None = None) -> Array:
    """The images alone; in a folder without folders of classes, the pictures in it by name.

    Args:
        path: of the folder or the .npz file.
        shape: (channels, height, width) that pictures of a folder are brought to, each by itself; by default they stay as they
            are where all are alike, see :func:`read_images`.
    """
    place = Path(path)
    if not place.is_dir():
        return _stored(place, "images")
    files = _labelled(place) or _pictures_in(place)
    if not files:
        raise DataError(f"'{place}' holds no pictures ({', '.join(kind[1:] for kind in _KINDS)})")
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "pictures are read by the package Pillow, which is not installed: pip install pillow, or give an .npz"
        ) from None
    pictures = []
    for file in files:
        try:
            with Image.open(file) as opened:
                pictures.append(opened.convert("L" if opened.mode in ("1", "L") else "RGB"))
        except (OSError, ValueError) as error:
            raise DataError(f"'{file}' is no picture that can be read: {error}") from None
    mode, size = _common([(picture.mode, picture.size) for picture in pictures], shape)
    alike = [picture if picture.mode == mode else picture.convert(mode) for picture in pictures]
    return np.stack([np.asarray(each if each.size == size else each.resize(size, Image.Resampling.BILINEAR)) for each in alike])


def _common(forms: list[tuple[str, tuple[int, int]]], shape: tuple[int, ...] | None) -> tuple[str, tuple[int, int]]:
    """Pillow's mode and (width, height) that all pictures are brought to."""
    if shape is not None:
        return "L" if shape[0] == 1 else "RGB", (shape[2], shape[1])
    modes, sizes = ({form[part] for form in forms} for part in (0, 1))
    return ("L" if modes == {"L"} else "RGB"), (forms[0][1] if len(sizes) == 1 else (_SIDE, _SIDE))


def _pictures_in(place: Path) -> list[Path]:
    return sorted(file for file in place.iterdir() if file.suffix.lower() in _KINDS)


def _labelled(place: Path) -> list[Path]:
    """Pictures in folders of their classes, by label and name."""
    return [file for part in sorted(place.iterdir()) if part.is_dir() for file in _pictures_in(part)]


def _stored(place: Path, what: str) -> Array:
    """One of the two arrays of an .npz file."""
    if place.suffix != ".npz" or not place.exists():
        raise DataError(f"'{place}' is neither a folder of pictures nor an .npz file that is there")
    try:
        with np.load(place, allow_pickle=False) as stored:
            name = next((name for name in _NAMES[what] if name in stored.files), None)
            if name is None:
                raise DataError(f"'{place}' holds {', '.join(stored.files)}, and no array {' or '.join(_NAMES[what])}")
            return np.asarray(stored[name])
    except (BadZipFile, ValueError, OSError) as error:
        raise DataError(f"'{place}' can't be read: {error}") from None
