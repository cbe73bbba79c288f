"""A private classifier for images of any size: public features, and a head whose settings follow from public numbers.

Images are brought to 32 × 32 pixels, one by one. Fixed features follow, none of which was made from photographs or from the
data: patches, scattering, and what a network learned from drawings (:mod:`lipdp.features`). They are put on the unit sphere,
and one linear layer from zero learns by whole-batch steps (sampling rate 1); the logits' gradient is clipped to C, so Δ = C.

How far the head goes: in units of Δ/N, T steps at rates η_t carry the weights M = Σ η_t far at most, and add noise of M·σ₁/N to
each logit, whatever T is; σ₁ is the noise multiplier of one single release of the same cost. M = κ·N/σ₁ makes that noise κ, for
all N and ε. κ = 3 with C = 0.1 was within .6
points of the best of some 34 settings on held-out tenths of CIFAR-10, at ε = 1, 3 and 8.

The data's mean is taken off where it can be afforded: its noise is z·R·√D/N long, with z ≈ 32/ε for a tenth of ε, R = 1.5 times
the usual length of D features. Above 0.3 of that length (N < 160·√D/ε) the mean of drawings has to do, which costs nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import check_is_fitted
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lipdp import losses, models
from lipdp._checks import choose, shown
from lipdp._numerics import Undrawn
from lipdp.data.images import has_labels, read_labels, read_pictures
from lipdp.errors import ConfigurationError, DataError
from lipdp.estimators.base import Choice, Classifier, plan_head, softmax
from lipdp.estimators.reading import is_place, note_rows
from lipdp.features.front import rows_through
from lipdp.features.learned import network_file
from lipdp.inputs import outputs_in_parts
from lipdp.training import PrivacyPlan

_SIDE = 32  # pixels along each side that features are made of
_NO_PIXELS = ("P", "HSV", "YCbCr", "LAB")  # modes of Pillow with as many bytes as grey or colour has
_SMALLEST, _LARGEST = 8, 1024
_STEPS, _CLIP, _MOMENTUM, _AVERAGE = 150, 0.1, 0.9, 0.9
_NOISE = 3.0  # κ
_STATISTICS, _RADIUS = 0.1, 1.5
_AFFORDABLE = 160.0  # N·ε/√D from which the data's own mean is worth its noise
_ORDERS = [1.0, 1.23, 0.524, 0.6]
_CROSS = [[0, 0], [2, 0], [-2, 0], [0, 2], [0, -2]]
_ROWS = 2048


class PrivateImageClassifier(Classifier):
    """A private classifier for images: arrays or tensors of 8 to 1024 pixels along each side, grey or in colour, or a folder.

    :class:`PrivateClassifier` hands images over to it; here its features can be chosen.

    Nothing is searched for, and nothing is read off the images but what the plan pays for: features are public, and rates, clip,
    schedule and averages follow from N, the number of classes, ε and δ. ``choice_`` and ``report()`` say what was chosen.

    Args:
        epsilon: ε of the whole fit.
        delta: δ; by default a power of ten, at most 1/(10·N) and 1e-5.
        classes: the labels that may occur; by default those in ``y``, which are then taken to be public.
        features: "small" (the network that comes with lipdp; minutes on a processor for 50,000 images), "large" (needs
            ``lipdp features train large``; meant for a GPU), or "auto": large on a GPU where that network is there, else small.
        mirror: whether an image and its mirror image mean the same; by default for colour, not for grey (letters, clothes).
        random_state: of the initial weights. Noise does not follow from it.
        reproducible: draw the noise from ``random_state`` too: repeatable, and *not private*.
        device: where to compute.
        budget: the account of the data, a :class:`lipdp.privacy.Budget` or the path of its file.

    Attributes:
        classes_: the labels.
        shape_: (channels, height, width) of the images.
        epsilon_: what was spent, at ``delta_``.
        plan_: of the training.
        history_: of the training.
        model_: the network, from images of 32 × 32 pixels to logits.
        choice_: the features, and why.
        public_: what was taken to be public.
        private_: False for a reproducible fit.

    Example:
        >>> import lipdp, numpy as np
        >>> draw = np.random.default_rng(0); y = draw.integers(0, 2, 200)
        >>> x = (40 * draw.random((200, 16, 16)) + 150 * (y[:, None, None] * (np.arange(16) < 8))).astype(np.uint8)
        >>> model = lipdp.PrivateImageClassifier(epsilon=3.0).fit(x[:150], y[:150])
        >>> model.epsilon_ <= 3.0, model.score(x[150:], y[150:]) > 0.8
        (True, True)
    """

    _records = "images"

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        classes: Any = None,
        features: str = "auto",
        mirror: bool | None = None,
        random_state: Any = None,
        reproducible: bool = False,
        device: Any = None,
        budget: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.classes, self.features, self.mirror = epsilon, delta, classes, features, mirror
        self.random_state, self.reproducible, self.device, self.budget = random_state, reproducible, device, budget

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        return tags

    def fit(self, X: Any, y: Any = None) -> PrivateImageClassifier:
        """Train privately.

        Args:
            X: images (N, height, width), (N, height, width, channels) or (N, channels, height, width), with 1 or 3 channels;
                whole numbers from 0 to 255, or numbers from 0 to 1. Or the path of a folder with a folder of pictures for each
                class, or of an .npz file (:func:`lipdp.data.read_images`).
            y: a label for each; a folder and a file bring their own.
        """
        if is_place(X):
            if y is not None and has_labels(X):
                raise DataError(
                    "these pictures bring their labels (the names of their folders, or an array of the file), and y gives others: "
                    "leave y out, or give the pictures in a folder without folders, and labels in the order of the files' names"
                )
            y = read_labels(X) if y is None else y
        # Each picture of a folder is brought to one size by itself: what the others are does not matter.
        pixels = _channels_first(read_pictures(X, side=_SIDE) if is_place(X) else X)
        labels, codes = self._labels(y, len(pixels))
        delta = self._check_privacy(len(pixels))
        channels = pixels.shape[1]
        self.choice_ = self._chosen(len(pixels), channels)
        seed, loss = self._seed(), losses.CrossEntropy()
        with Undrawn():
            torch.manual_seed(seed)
            options = {name: self.choice_.settings[name] for name in ("blocks", "centre", "radius", "clip")}
            model = models.create("patches-linear", input_shape=(channels, _SIDE, _SIDE), classes=len(labels), **options)
        private_mean = self.choice_.settings["centre"] == "private"
        decided = plan_head(
            model,
            loss,
            dataset_size=len(pixels),
            batch_size=len(pixels),
            epsilon=float(self.epsilon),
            delta=delta,
            steps=_STEPS,
            statistics_budget=_STATISTICS if private_mean else None,
        )
        self._check_account([decided.run])
        images = _sized(pixels)
        note_rows(images.flatten(1).numpy(), float(self.epsilon), delta, self._account_path)
        self.classes_, self.shape_ = labels, tuple(pixels.shape[1:])
        self.public_ = (
            f"the number of images, {len(pixels)}, and their size, {' × '.join(map(str, self.shape_[1:]))} pixels"
            + (", to which each was brought" if is_place(X) else ""),
            f"that all of them are {'grey' if channels == 1 else 'taken in colour'}",
            self._public_classes(labels),
        )
        place = torch.device("cpu" if self.device is None else self.device)
        data = TensorDataset(images.to(place), torch.from_numpy(codes).to(place))
        optimizer, scheduler = _optimizer(model, decided)
        self._train(model, loss, optimizer, scheduler, decided, data, seed=seed, ema_decay=_AVERAGE, settle=True)
        return self

    def _chosen(self, records: int, channels: int) -> Choice:
        """Features and settings, from public numbers alone."""
        wanted = choose("features", self.features, ("auto", "small", "large"))
        there = network_file("large").exists()
        on_gpu = self.device is not None and torch.device(self.device).type == "cuda"
        level = ("large" if on_gpu and there else "small") if wanted == "auto" else wanted
        if self.mirror is not None and not isinstance(self.mirror, bool):
            raise ConfigurationError(f"mirror is {shown(self.mirror)}: True, False, or None for what usually holds")
        mirror = channels == 3 if self.mirror is None else self.mirror
        blocks, width = _blocks(level, channels, mirror)
        affordable = records * float(self.epsilon) > _AFFORDABLE * math.sqrt(width)
        settings = {
            "blocks": blocks,
            "centre": "private" if affordable else "drawn",
            "radius": _RADIUS,
            "clip": _CLIP,
            "steps": _STEPS,
            "noise": _NOISE,
        }
        why = (
            "as asked for" if wanted != "auto" else "a GPU and its network are there" if level == "large" else "what runs anywhere"
        )
        mean = (
            "they are centred by their mean, which a share of ε pays for"
            if affordable
            else "not centred by their mean, for at so few images and so small an ε it would be all noise"
        )
        return Choice(level, f"{why}; {width} public features of each image{', mirrored too' if mirror else ''}; {mean}", settings)

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        """Logits. Pictures of a folder are brought to the size of those that it was fitted on; an array has to have it."""
        check_is_fitted(self)
        pixels = _channels_first(read_pictures(X, self.shape_) if is_place(X) else X)
        if tuple(pixels.shape[1:]) != self.shape_:
            raise DataError(
                f"the classifier was fitted on images of shape {self.shape_}, and these are of {tuple(pixels.shape[1:])}"
            )
        place = next(self.model_.parameters()).device
        rows = rows_through(self.model_, 1024, place)
        logits: npt.NDArray[np.float64] = outputs_in_parts(self.model_, pixels, rows, _sized).numpy()
        return logits

    def _shares(self, outputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The softmax of the logits."""
        return softmax(outputs)


def _optimizer(model: torch.nn.Module, decided: PrivacyPlan) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    """SGD with momentum down a line to 0; a constant rate of its start would carry the weights κ·N/σ₁ far, in units of Δ/N."""
    single = decided.noise_multiplier / math.sqrt(decided.steps)
    reach = _NOISE * decided.dataset_size / single
    rate = reach / decided.steps * (1 - _MOMENTUM) / decided.sensitivity
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=_MOMENTUM)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / decided.steps))


def _blocks(level: str, channels: int, mirror: bool) -> tuple[list[dict[str, Any]], int]:
    """The blocks of features of a cost level, and how many features they have."""
    large = level == "large"
    filters = (1000 if large else 600) // (1 if mirror else 2)  # not mirrored, each gives twice as many features
    patches = {"kind": "patches", "patch": 4, "grid": 4, "overlap": 2.5, "filters": filters, "decorrelate": 0.3, "mirror": mirror}
    scattering = {"kind": "scattering", "J": 3, "flip": mirror, "orders": _ORDERS}
    learned = {"kind": "learned", "network": level, "flip": mirror, "weight": 1.5 if large else 1.0}
    learned |= {"shifts": _CROSS} if large else {}
    width = filters * (1 if mirror else 2) * 16 + channels * 217 * 16 + (6656 if large else 3328)
    return [patches, scattering, learned], width


def is_images(given: Any) -> bool:
    """Whether records are images: a folder or file, an array of 3 or 4 dimensions, a list of arrays of 2 or 3."""
    if is_place(given):
        return True
    if isinstance(given, list | tuple) or _holds_arrays(given):
        first = next(iter(given), None)
        return len(getattr(first, "shape", ())) in (2, 3) or hasattr(first, "getbands")  # arrays, or pictures of Pillow
    return getattr(given, "ndim", 2) in (3, 4)


def _holds_arrays(given: Any) -> bool:
    """Whether it is one column of objects, each of them an array."""
    return getattr(given, "ndim", 0) == 1 and getattr(getattr(given, "dtype", None), "kind", "") == "O" and hasattr(given, "tolist")


def _channels_first(given: Any) -> torch.Tensor:
    """Images as (N, channels, height, width), of the type that they came in; checked."""
    if _holds_arrays(given):
        given = list(given)
    if isinstance(given, list | tuple) and any(getattr(picture, "mode", None) in _NO_PIXELS for picture in given):
        raise DataError(
            "the bytes of some of Pillow's pictures here are places in a palette, or hue and the like, and no pixels: "
            "[picture.convert('RGB') for picture in X]"
        )
    try:
        images = given if isinstance(given, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    except (TypeError, ValueError):
        raise DataError(
            "images are an array of numbers, all of one size, and these are not: bring them to one, or give a folder of pictures"
        ) from None
    images = images.detach().cpu()
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.movedim(3, 1)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            f"images come as (N, height, width), (N, height, width, channels) or (N, channels, height, width), 1 or 3 channels, "
            f"not in the shape {tuple(images.shape)}: X[None] is a batch of one, and X[..., :3] leaves out a fourth channel behind "
            "three of colour"
        )
    sides = tuple(images.shape[2:])
    if not len(images) or min(sides) < _SMALLEST or max(sides) > _LARGEST:
        raise DataError(
            f"there are {len(images)} images of {sides[0]} × {sides[1]} pixels: give some, of {_SMALLEST} to {_LARGEST} pixels"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise DataError(
            f"pixels are whole numbers of type uint8 (0 to 255) or floating point from 0 to 1, not {images.dtype}: "
            "X.astype('uint8') where white is 255, (X / white).astype('float32') for another white (65535, or 1 of black and white)"
        )
    if images.is_floating_point() and not bool(((images >= 0) & (images <= 1)).all()):
        raise DataError("floating-point pixels have to be finite and from 0 to 1: divide by what white is")
    return images


def _sized(images: torch.Tensor) -> torch.Tensor:
    """Each image by itself, as float32 from 0 to 1, of 32 × 32 pixels."""
    out = torch.empty(len(images), images.shape[1], _SIDE, _SIDE)
    for start in range(0, len(images), _ROWS):
        part = images[start : start + _ROWS]
        part = part.float() / 255 if part.dtype == torch.uint8 else part.float()
        if tuple(part.shape[2:]) != (_SIDE, _SIDE):
            part = F.interpolate(part, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False, antialias=True)
        out[start : start + _ROWS] = part
    return out
