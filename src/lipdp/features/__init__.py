"""Fixed, public features: what is made without looking at the data costs no privacy, and a head that learns from it does.

Layers that turn images or rows into features, each with its proved bounds, and what computes them once for a whole dataset.
"""

from lipdp.features.drawings import draw_images
from lipdp.features.front import FrozenFeatures, extract_features, split_front
from lipdp.features.kernels import Asinh, Constant, Landmarks, RandomFourier, RandomReLU
from lipdp.features.layers import Straighten
from lipdp.features.learned import LearnedFeatures
from lipdp.features.patches import PatchFeatures
from lipdp.features.scattering import Scattering2d
from lipdp.features.stacks import feature_front, scattering_front

__all__ = [
    "Asinh",
    "Constant",
    "FrozenFeatures",
    "Landmarks",
    "LearnedFeatures",
    "PatchFeatures",
    "RandomFourier",
    "RandomReLU",
    "Scattering2d",
    "Straighten",
    "draw_images",
    "extract_features",
    "feature_front",
    "scattering_front",
    "split_front",
]
