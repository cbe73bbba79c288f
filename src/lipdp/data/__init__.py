"""Public datasets in their publishers' own formats, and the splits and checks that training needs.

>>> from lipdp import data
>>> train, test, metadata = data.load("digits")
>>> train_part, validation = data.split(train, 0.1)

`load` looks under `root`, else under the folder named by the environment variable LIPDP_DATA, else in the user's
cache folder; what is missing there is downloaded and checked. A dataset is a description and what
reads its files, plus a line in `datasets.py`.
"""

from lipdp.data.augment import (
    Augmentation,
    Compose,
    FixedAugmentation,
    Flip,
    Identity,
    PrecomputedCopies,
    RandomCrop,
    Shifts,
    TestTimeAverage,
)
from lipdp.data.colour import (
    COLOUR_SPACES,
    HSV,
    RGB,
    YIQ,
    YUV,
    Grayscale,
    StandardRGB,
    colour_space,
    rgb_to_grayscale,
    rgb_to_hsv,
    rgb_to_yiq,
    rgb_to_yuv,
)
from lipdp.data.datasets import available, info, load, names
from lipdp.data.files import Availability, DatasetInfo, split
from lipdp.data.images import picture_files, read_images, unreadable_pictures
from lipdp.data.norms import (
    NormHistogram,
    Projection,
    choose_input_bound,
    input_norms,
    map_inputs,
    norm_histogram,
    project_inputs,
    require_finite,
)
from lipdp.data.records import Columns, Stored
from lipdp.data.text import hashed_bag, reviews, windows

__all__ = [
    "COLOUR_SPACES",
    "HSV",
    "RGB",
    "YIQ",
    "YUV",
    "Augmentation",
    "Availability",
    "Columns",
    "Compose",
    "DatasetInfo",
    "FixedAugmentation",
    "Flip",
    "Grayscale",
    "Identity",
    "NormHistogram",
    "PrecomputedCopies",
    "Projection",
    "RandomCrop",
    "Shifts",
    "StandardRGB",
    "Stored",
    "TestTimeAverage",
    "available",
    "choose_input_bound",
    "colour_space",
    "hashed_bag",
    "info",
    "input_norms",
    "load",
    "map_inputs",
    "names",
    "norm_histogram",
    "picture_files",
    "project_inputs",
    "read_images",
    "require_finite",
    "reviews",
    "rgb_to_grayscale",
    "rgb_to_hsv",
    "rgb_to_yiq",
    "rgb_to_yuv",
    "split",
    "unreadable_pictures",
    "windows",
]
