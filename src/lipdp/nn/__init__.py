"""Layers shaped like torch.nn, each with a rule in the calculus of bounds."""

from lipdp.nn.activation import FullSort, GroupSort, MaxMin
from lipdp.nn.boundary import Boundary, BoundedInput, ClipGradient
from lipdp.nn.container import Flatten, Residual, Sequential
from lipdp.nn.conv import SpectralConv2d
from lipdp.nn.linear import SpectralLinear
from lipdp.nn.normalization import LayerCentering
from lipdp.nn.pooling import L2NormPool2d, ScaledAvgPool2d

__all__ = [
    "Boundary",
    "BoundedInput",
    "ClipGradient",
    "Flatten",
    "FullSort",
    "GroupSort",
    "L2NormPool2d",
    "LayerCentering",
    "MaxMin",
    "Residual",
    "ScaledAvgPool2d",
    "Sequential",
    "SpectralConv2d",
    "SpectralLinear",
]
