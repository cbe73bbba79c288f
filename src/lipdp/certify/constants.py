"""How steep a network is with the weights it has now: what a robustness certificate divides by."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F

from lipdp import nn
from lipdp._numerics import Undrawn, unit_roundoff
from lipdp.bounds import Analysis, Shape, analyse, certified_norm
from lipdp.bounds.propagate import backward_pass, forward_pass, program_of
from lipdp.bounds.rounding import forward_error
from lipdp.errors import ConfigurationError, UnboundedError, UnsupportedError
from lipdp.export import Builder, Lowering, Seen, check_same, find_lowering, lower, used_weight
from lipdp.parametrize import Constrained
from lipdp.program import Program, check_program, describe

# Layers whose norm is measured: their lowering is a torch layer, whose rule certifies the norm of the weights that it has.
_SPECTRAL = (nn.SpectralLinear, nn.SpectralConv1d, nn.SpectralConv2d, nn.SpectralConv3d, nn.SpectralConvTranspose2d)
_MEASURED = (*_SPECTRAL, nn.L1Linear)
# The Gram certificate of a matrix of norm 1 may come out this much larger; beyond it the weights are outside their set.
_LOOSE = 5e-3
# Other constrained layers have to be where their projection puts them.
_UNMOVED = 1e-5


@dataclass(frozen=True)
class Stage:
    """A part of a network whose constant is known, from one scaling (or the input) to the next (or the outputs).

    Attributes:
        module: what it computes.
        lipschitz: its constant.
        rounding: the norm of what enters → how far rounding can lead what it computes from what is exact.
    """

    module: fx.GraphModule
    lipschitz: float
    rounding: Callable[[float], float]


@dataclass(frozen=True)
class Scaling:
    """A BoundedInput that everything passes through, and what comes between it and the one before.

    Attributes:
        front: what comes before it.
        layer: the scaling itself.
        radius: of the ball or sphere.
        ball: whether shorter inputs stay as they are.
    """

    front: Stage
    layer: nn.BoundedInput
    radius: float
    ball: bool


@dataclass(frozen=True)
class Network:
    """A model frozen for certification.

    Attributes:
        model: the program of a copy in evaluation mode.
        scalings: how what the layers compute is brought into balls or onto spheres, in the order of execution.
        rest: what is behind the last of them, up to the outputs.
        slack: (1+u)^operations, for the arithmetic of the constants.
        pairs: (K, K): constants of the differences of two outputs, from the same place; ``None`` where the last layer is no
            matrix, and all that is known of them is √2·ℓ.
    """

    model: Program
    scalings: tuple[Scaling, ...]
    rest: Stage
    slack: float
    pairs: torch.Tensor | None

    @property
    def lipschitz(self) -> float:
        """ℓ from the last scaling, or the input where there is none, to the outputs."""
        return self.rest.lipschitz


def freeze(model: torch.nn.Module, input_shape: Shape, dtype: torch.dtype) -> Network:
    """A copy of ``model`` with its constants, for inputs of this shape and type.

    The calculus runs over a copy whose parameters are frozen and whose constrained layers are replaced by torch's own, with the
    same weights: then every layer counts with the certified norm of the weights that it has *now*, not with the
    norm that training keeps (1 for a spectral layer) or allows (∞ for an unconstrained one). It is cut at every scaling that
    everything passes through, for a sphere has a geometry but no constant.
    """
    own = copy.deepcopy(model).eval().requires_grad_(False)
    _check_weights(own)
    program = program_of(own, input_shape)
    check_program(program)
    _refuse_jumps(program)
    rest = _measured(program, input_shape)
    dtypes = {dtype} | {p.dtype for p in own.parameters() if p.is_floating_point()}
    unit = max(map(unit_roundoff, dtypes))
    scalings: list[Scaling] = []
    shape, norm, operations = input_shape, math.inf, 0
    while (found := _next_scaling(rest)) is not None:
        node, layer = found
        before, rest = _split(rest, node)
        front, count = _stage(before, shape, norm, unit, model)
        scalings.append(Scaling(front, layer, layer.norm, layer.mode == "ball"))
        shape, norm, operations = layer.input_shape, layer.norm, operations + count
    behind, count = _stage(rest, shape, norm, unit, model)
    return Network(program, tuple(scalings), behind, (1 + unit) ** (operations + count), _pair_constants(rest, shape, norm))


def _stage(module: fx.GraphModule, shape: Shape, norm: float, unit: float, model: torch.nn.Module) -> tuple[Stage, int]:
    """A part with its constant, for inputs of at most this norm; and how many operations it has."""
    analysis = analyse(module, 1.0, input_shape=shape, input_norm=norm)
    known: dict[float, float] = {}

    def rounding(largest: float) -> float:
        """Upwards to a power of two, so that few norms are looked at. A scaling before it leaves its last digits open."""
        entering = norm if math.isfinite(norm) else 2.0 ** math.ceil(math.log2(max(largest, 2.0**-100)))
        if entering not in known:
            forward = forward_pass(analysis.program, entering)
            final = next(node for node in analysis.program.graph.nodes if node.op == "output").args[0]
            gains = backward_pass(analysis.program, forward, final, 1.0, clip=False)
            scaled = 16 * unit * norm if math.isfinite(norm) else 0.0
            known[entering] = forward_error(analysis.program, forward, gains, unit, entering=scaled)
        return known[entering]

    return Stage(module, _finite(analysis, model), rounding), analysis.operations


def _pair_constants(plain: fx.GraphModule, input_shape: Shape, input_norm: float = math.inf) -> torch.Tensor | None:
    """Constants of ŷ_i − ŷ_j where ŷ = W·h + b: that is (w_i − w_j)·h + …, so ‖w_i − w_j‖ times the constant of h.

    Never above √2·ℓ, ℓ = ‖W‖₂ times the same, and often well below: ‖W‖₂ counts what all outputs have in common. The constant
    of h is that of the network with a single row of norm 1 in W's place.
    """
    place = _last_matrix(plain)
    if place is None:
        return None
    layer = plain.get_submodule(place)
    assert isinstance(layer, torch.nn.Linear)
    with Undrawn():
        row = torch.nn.Linear(layer.in_features, 1, bias=False).to(layer.weight).requires_grad_(False)
    row.weight.zero_()[0, 0] = 1.0
    plain.set_submodule(place, row)
    try:
        before = analyse(plain, 1.0, input_shape=input_shape, input_norm=input_norm).lipschitz
    finally:
        plain.set_submodule(place, layer)
    weight = layer.weight.detach().double()
    return torch.stack([torch.linalg.vector_norm(weight - one, dim=1) for one in weight]) * (before * (1 + 1e-9))


def _last_matrix(plain: fx.GraphModule) -> str | None:
    """Where the linear layer is that makes the outputs of shape (batch, K), K ≥ 2, if there is one that does nothing else."""
    node = next(node for node in reversed(plain.graph.nodes) if node.op == "output").args[0]
    while isinstance(node, fx.Node) and node.op == "call_module":
        module, place = plain.get_submodule(str(node.target)), str(node.target)
        if type(module) is torch.nn.Linear:
            once = sum(other.target == node.target for other in plain.graph.nodes) == 1 and len(node.users) == 1
            return place if once and module.out_features > 1 else None
        if type(module) is not nn.ClipGradient:
            return None
        node = node.args[0]
    return None


def _check_weights(model: torch.nn.Module) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, Constrained):
            continue
        if isinstance(layer, _SPECTRAL) and layer.maps():
            continue  # W = π(θ) is certified whenever it is computed, for every θ
        if isinstance(layer, _SPECTRAL):
            groups, weight = getattr(layer, "groups", 1), used_weight(layer).detach()
            norm = float(certified_norm(weight.reshape(groups, weight.shape[0] // groups, -1)).max())
            outside = "" if norm <= 1 + _LOOSE else f"its weights have a certified norm of {norm:.4g}, above 1"
        else:
            outside = _moved(layer)
        if outside:
            raise ConfigurationError(
                f"layer '{name}' ({type(layer).__name__}) is outside its constraint set: {outside}. Bring the weights back with "
                "lipdp.parametrize.project_(model), as training does after every step, or certify a projected copy of the model."
            )


def _moved(layer: Constrained) -> str:
    assert isinstance(layer, torch.nn.Module)
    projected = copy.deepcopy(layer)
    projected.project_()
    for (name, before), after in zip(layer.named_parameters(), projected.parameters(), strict=True):
        distance = float(torch.linalg.vector_norm(after.double() - before.double()))
        if not distance <= _UNMOVED * (1 + float(torch.linalg.vector_norm(before.double()))):
            return f"projection moves its parameter '{name}' by {distance:.2g}"
    return ""


def _refuse_jumps(program: Program) -> None:
    """Bounds on slopes say nothing of functions that jump, or that draw."""
    for node in program.graph.nodes:
        where = describe(node, program.modules)
        module = program.modules.get(str(node.target)) if node.op == "call_module" else None
        threshold = 20.0
        if isinstance(module, torch.nn.Softplus):
            threshold = float(module.threshold)
        elif node.target is F.softplus:
            threshold = float(node.args[2] if len(node.args) > 2 else node.kwargs.get("threshold", 20))
        if threshold < 20:
            raise UnsupportedError(f"{where} jumps where it turns into the identity, at threshold={threshold:g}; use 20 or more.")
        if node.target is F.dropout and (node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)):
            raise UnsupportedError(f"{where} draws at random in evaluation too; give it training=self.training.")


def _measured(program: Program, input_shape: Shape) -> fx.GraphModule:
    def choose(module: torch.nn.Module) -> Lowering | None:
        return find_lowering(module) if isinstance(module, _MEASURED) else None

    for node in program.graph.nodes:  # tensors that `forward` makes: the trace has taken them off the model again
        if node.op == "get_attr" and "." not in str(node.target) and not hasattr(program.model, str(node.target)):
            setattr(program.model, str(node.target), program.constants[node])
    seen = {node: Seen(shapes[0], torch.float32) for node, shapes in program.shapes.items() if shapes}
    plain = lower(program.model, program.graph, seen, choose, "Frozen").eval().requires_grad_(False)
    check_same(program.model, plain, input_shape)
    return plain


def _next_scaling(model: fx.GraphModule) -> tuple[fx.Node, nn.BoundedInput] | None:
    """The first BoundedInput that the network is to be cut at: a sphere has no constant; a ball's geometry is better than its own.

    Mode "floor" counts with its constant norm/floor, and so does a ball that something passes by.
    """
    for node in model.graph.nodes:
        layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.BoundedInput) and (
            layer.mode == "sphere" or (layer.mode == "ball" and _reads_before(model, node) is None)
        ):
            return node, layer
    return None


def _reads_before(model: fx.GraphModule, scaling: fx.Node) -> fx.Node | None:
    """An operation that reads what comes before the scaling without passing through it, if there is one."""
    known, passed = {scaling}, False
    node: fx.Node
    for node in model.graph.nodes:
        passed = passed or node is scaling
        if node.op == "get_attr" or (passed and all(source in known for source in node.all_input_nodes)):
            known.add(node)
        elif passed and node is not scaling:
            return node
    return None


def _split(model: fx.GraphModule, scaling: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What comes before the scaling, and what comes behind it."""
    modules = dict(model.named_modules())
    around, source = _reads_before(model, scaling), scaling.args[0]
    if around is not None:
        raise UnsupportedError(
            f"{describe(around, modules)} reads what comes before the sphere of layer '{scaling.target}' (BoundedInput), so the "
            "sphere's geometry does not cover the whole model. Put the BoundedInput first, or use mode='ball'."
        )
    assert isinstance(source, fx.Node)
    front, rest = Builder(modules), Builder(modules)
    rest.env[scaling] = rest.graph.placeholder("scaled")
    passed = False
    for node in model.graph.nodes:
        if node is scaling:
            passed = True
            front.graph.output(front.env[source])
            continue
        if not passed:
            front.copy(node, model)
        if passed or node.op == "get_attr":  # a constant may serve both parts
            rest.copy(node, model)
    return front.finish("Front"), rest.finish("Rest")


def _finite(analysis: Analysis, model: torch.nn.Module) -> float:
    if math.isfinite(analysis.lipschitz):
        return analysis.lipschitz
    unbounded = [position for position, row in enumerate(analysis.layers) if not math.isfinite(row.cotangent)]
    row = analysis.layers[min(unbounded[-1] + 1 if unbounded else 0, len(analysis.layers) - 1)]
    why = f" ({row.note})" if row.note else ""
    raise UnboundedError(
        f"{type(model).__name__} has no finite Lipschitz constant, so nothing can be certified: {row.where} is unboundedly "
        f"steep{why}. Put another layer in its place, or bound what enters it (lipdp.nn.Boundary(norm=…), "
        "BoundedInput(mode='ball'))."
    )
