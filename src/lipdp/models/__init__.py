"""Networks by name, one constructor each: Lipschitz ones whose bounds are known, and conventional ones ("plain-…") to clip.

Fixed features live in :mod:`lipdp.features`; their names here (``Scattering2d``, ``split_front`` …) are aliases of those.
"""

from lipdp.features.front import FrozenFeatures, extract_features, split_front
from lipdp.features.kernels import RandomReLU
from lipdp.features.layers import Straighten
from lipdp.features.patches import PatchFeatures
from lipdp.features.scattering import Scattering2d
from lipdp.models.by_name import create, names, register
from lipdp.models.heads import patches_linear, patches_mlp, scattering_certified, scattering_linear, scattering_mlp, tabular
from lipdp.models.lipschitz import lenet, mixer, mlp, resnet, resnet6, resnet10, resnet18, transformer, vgg, vgg5, vgg8, vgg11
from lipdp.models.plain import (
    plain_cnn,
    plain_lstm,
    plain_mlp,
    plain_resnet18,
    plain_rnn,
    plain_transformer,
    plain_vgg11,
    resized,
    tanh_cnn,
)
from lipdp.models.twins import boundary_twin, plain_dense, plain_lenet, plain_mixer, plain_resnet, plain_vgg

__all__ = [
    "FrozenFeatures",
    "PatchFeatures",
    "RandomReLU",
    "Scattering2d",
    "Straighten",
    "boundary_twin",
    "create",
    "extract_features",
    "lenet",
    "mixer",
    "mlp",
    "names",
    "patches_linear",
    "patches_mlp",
    "plain_cnn",
    "plain_dense",
    "plain_lenet",
    "plain_lstm",
    "plain_mixer",
    "plain_mlp",
    "plain_resnet",
    "plain_resnet18",
    "plain_rnn",
    "plain_transformer",
    "plain_vgg",
    "plain_vgg11",
    "register",
    "resized",
    "resnet",
    "resnet6",
    "resnet10",
    "resnet18",
    "scattering_certified",
    "scattering_linear",
    "scattering_mlp",
    "split_front",
    "tabular",
    "tanh_cnn",
    "transformer",
    "vgg",
    "vgg5",
    "vgg8",
    "vgg11",
]
