"""Networks by name, one constructor each: Lipschitz ones whose bounds are known, and conventional ones ("plain-…") to clip."""

from lipdp.models.boundary_twins import boundary_twin
from lipdp.models.conventional import (
    plain_cnn,
    plain_lstm,
    plain_mlp,
    plain_resnet18,
    plain_rnn,
    plain_transformer,
    plain_vgg11,
)
from lipdp.models.features import FrozenFeatures, extract_features, split_front
from lipdp.models.lenet import lenet
from lipdp.models.mixer import mixer, transformer
from lipdp.models.mlp import mlp
from lipdp.models.patch_heads import patches_linear, patches_mlp
from lipdp.models.patches import PatchFeatures
from lipdp.models.plain_twins import plain_dense, plain_lenet, plain_mixer, plain_resnet, plain_vgg
from lipdp.models.random_relu import RandomReLU
from lipdp.models.registry import create, names, register
from lipdp.models.resized import resized
from lipdp.models.resnet import resnet, resnet6, resnet10, resnet18
from lipdp.models.scattering import Scattering2d
from lipdp.models.scattering_heads import scattering_linear, scattering_mlp
from lipdp.models.straighten import Straighten
from lipdp.models.tabular import tabular
from lipdp.models.tanh_cnn import tanh_cnn
from lipdp.models.vgg import vgg, vgg5, vgg8, vgg11

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
