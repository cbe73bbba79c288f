"""Images of one's own: a folder with one folder of pictures for each class, or an .npz file of two arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from lipdp.errors import DataError

__all__ = ["read_images"]

_KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_NAMES = {"images": ("images", "x", "X", "data"), "labels": ("labels", "y", "targets")}
_SIDE = 32  # what pictures of several sizes are brought to

Array = npt.NDArray[Any]


def read_images(path: str | os.PathLike[str]) -> tuple[Array, Array]:
    """(images, labels) of a folder or a file.

    A folder holds one folder for each class, named by its label, with pictures in it; they are grey where all of them are, and
    brought to 32 × 32 pixels where they differ in size. A file of :func:`numpy.savez` holds ``images`` (or x) and ``labels`` (or
    y).

    Args:
        path: of the folder or the .npz file.
    """
    place = Path(path)
    if place.is_dir():
        return _folder(place)
    if place.suffix != ".npz" or not place.exists():
        raise DataError(f"'{place}' is neither a folder of pictures nor an .npz file that is there")
    try:
        with np.load(place, allow_pickle=False) as stored:
            chosen = {what: next((n for n in names if n in stored.files), None) for what, names in _NAMES.items()}
            missing = [what for what, name in chosen.items() if name is None]
            if missing:
                raise DataError(f"'{place}' holds {', '.join(stored.files)}, and no array {' or '.join(_NAMES[missing[0]])}")
            return stored[str(chosen["images"])], stored[str(chosen["labels"])]
    except (BadZipFile, ValueError, OSError) as error:
        raise DataError(f"'{place}' can't be read: {error}") from None


def _folder(place: Path) -> tuple[Array, Array]:
    classes = sorted(part for part in place.iterdir() if part.is_dir())
    files = [(file, part.name) for part in classes for file in sorted(part.iterdir()) if file.suffix.lower() in _KINDS]
    if not files:
        raise DataError(f"'{place}' holds no pictures in folders, one for each class: {place.name}/LABEL/picture.png")
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "pictures are read by the package Pillow, which is not installed: pip install pillow, or give an .npz"
        ) from None
    pictures = []
    for file, _ in files:
        try:
            with Image.open(file) as picture:
                pictures.append(np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB")))
        except (OSError, ValueError) as error:
            raise DataError(f"'{file}' is no picture that can be read: {error}") from None
    if len({picture.ndim for picture in pictures}) > 1:
        pictures = [picture if picture.ndim == 3 else np.repeat(picture[:, :, None], 3, axis=2) for picture in pictures]
    if len({picture.shape for picture in pictures}) > 1:
        size = (_SIDE, _SIDE)
        pictures = [np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)) for picture in pictures]
    return np.stack(pictures), np.array([label for _, label in files])
