"""Layers shaped like torch.nn, each with a rule in the calculus of bounds."""

from lipdp.nn.activation import Abs, BoundedPReLU, FullSort, GroupSort, Householder, LayerScale, MaxMin
from lipdp.nn.attention import LipschitzAttention, TransformerBlock
from lipdp.nn.boundary import Boundary, BoundedInput, ClipGradient
from lipdp.nn.container import ConcatResidual, ConvexMix, ConvexResidual, Flatten, Residual, Sequential
from lipdp.nn.conv import SpectralConv1d, SpectralConv2d, SpectralConv3d, SpectralConvTranspose2d
from lipdp.nn.embedding import (
    BoundedEmbedding,
    LearnedPositions,
    MaskedTokenMean,
    SinusoidalPositions,
    TokenBall,
    TokenMean,
)
from lipdp.nn.fourier_conv import FourierConv2d
from lipdp.nn.linear import FrobeniusLinear, L1Linear, SpectralLinear
from lipdp.nn.norms import GroupNorm, LayerCentering, LayerNorm, Normalize, RMSNorm, Standardize
from lipdp.nn.pooling import (
    GlobalL2NormPool,
    InvertibleDownsampling,
    InvertibleUpsampling,
    L2NormPool1d,
    L2NormPool2d,
    ScaledAdaptiveAvgPool2d,
    ScaledAvgPool1d,
    ScaledAvgPool2d,
)

__all__ = [
    "Abs",
    "Boundary",
    "BoundedEmbedding",
    "BoundedInput",
    "BoundedPReLU",
    "ClipGradient",
    "ConcatResidual",
    "ConvexMix",
    "ConvexResidual",
    "Flatten",
    "FourierConv2d",
    "FrobeniusLinear",
    "FullSort",
    "GlobalL2NormPool",
    "GroupNorm",
    "GroupSort",
    "Householder",
    "InvertibleDownsampling",
    "InvertibleUpsampling",
    "L1Linear",
    "L2NormPool1d",
    "L2NormPool2d",
    "LayerCentering",
    "LayerNorm",
    "LayerScale",
    "LearnedPositions",
    "LipschitzAttention",
    "MaskedTokenMean",
    "MaxMin",
    "Normalize",
    "RMSNorm",
    "Residual",
    "ScaledAdaptiveAvgPool2d",
    "ScaledAvgPool1d",
    "ScaledAvgPool2d",
    "Sequential",
    "SinusoidalPositions",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SpectralConvTranspose2d",
    "SpectralLinear",
    "Standardize",
    "TokenBall",
    "TokenMean",
    "TransformerBlock",
]
