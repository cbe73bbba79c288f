"""The one tracer: from a module's ``forward`` to a graph of operations, down to the modules that are taken as they are.

torch.fx runs ``forward`` once with stand-ins and writes down what is done to them. What it does not write down is refused here,
with the line it stands on: writes in place keep their name, so that whoever reads the graph sees them; autocast contexts, custom
backward functions, layers that run with other tensors than their own and tensors computed from parameters behind the tracer's back
are errors.
"""

from __future__ import annotations

import linecache
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lipdp.errors import LipdpError, UnsupportedError

Leaf = Callable[[torch.nn.Module], bool]
IN_PLACE_OPERATORS = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.imatmul,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_LINE = "line"


class _Proxy(fx.Proxy):
    """A stand-in that notices ``x += y``: torch.fx would write it down as ``x = x + y``, and lose that x itself changes."""

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UnsupportedError(
            f"forward assigns to a part of an activation ({_user_line()}), which the graph can't show. Use torch.where, torch.cat "
            "or a multiplication by a constant mask instead."
        )


def _writes(target: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def write(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return write


for _operator in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_operator.__name__}__", _writes(_operator))


class _Tracer(fx.Tracer):
    """Stops at modules for which ``leaf`` is true, and at torch's own."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf
        self._autocast = _autocast()
        self._own: dict[int, list[torch.Tensor | None]] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._own = {id(module): _tensors(module) for module in root.modules()}
        self._memory = {t.untyped_storage().data_ptr() for t in root.parameters() if t.requires_grad and t.numel()}
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        if self.leaf(m):
            return True
        if isinstance(m, _CONTAINERS) and type(m).forward is getattr(torch.nn, type(m).__name__, type(m)).forward:
            return False
        return type(m).__module__.startswith("torch.nn")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind not in ("placeholder", "output"):
            node.meta[_LINE] = _user_line()
            if _autocast() != self._autocast:
                raise UnsupportedError(
                    f"forward computes under torch.autocast ({node.meta[_LINE]}): in half precision, while the bounds are those "
                    "of the model's own arithmetic. Take the context out of forward, and plan for it: lipdp.plan(…, "
                    "precision='bfloat16')."
                )
        return node

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if any(a is not b for a, b in zip(_tensors(m), self._own.get(id(m), _tensors(m)), strict=False)):
            raise UnsupportedError(
                f"forward calls a {type(m).__name__} with other tensors than its own ({_user_line()}; torch.func.functional_call, "
                "stateless calls, swapped parameters), and its bound would be that of its own. Compute with them in a module "
                "that has a rule (lipdp.bounds.rule)."
            )
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, complex) or (isinstance(a, torch.Tensor) and a.is_complex()):
            raise UnsupportedError(
                f"forward combines activations with a complex constant ({_user_line()}); the calculus is one of real numbers. "
                "Use a real and an imaginary part, or put the computation into a module with a rule (lipdp.bounds.rule)."
            )
        if isinstance(a, torch.Tensor) and not self._is_of_the_model(a):
            self._check_constant(a)
        return super().create_arg(a)

    def _is_of_the_model(self, a: torch.Tensor) -> bool:
        return any(a is tensor for tensors in self._own.values() for tensor in tensors)

    def _check_constant(self, a: torch.Tensor) -> None:
        if type(a) not in _ORDINARY or a.layout != torch.strided or a.is_quantized:
            raise UnsupportedError(
                f"forward uses a constant of type {type(a).__name__}, {a.layout} ({_user_line()}), which may compute what it "
                "likes. Use an ordinary, dense tensor."
            )
        shares = a.numel() > 0 and a.untyped_storage().data_ptr() in self._memory
        if a.requires_grad or shares:
            raise UnsupportedError(
                f"forward uses a tensor that is computed from a trainable parameter past the tracer ({_user_line()}), so the "
                "graph can't say how the parameter acts. Read parameters as attributes of their module (self.weight), and use "
                "them as they are."
            )


def trace_graph(model: torch.nn.Module, leaf: Leaf, advice: str) -> fx.Graph:
    """The graph of ``model``'s forward, down to torch's own modules and those for which ``leaf`` is true.

    Tensors that ``forward`` makes are left on the model as attributes ``_tensor_constant…``, which its get_attr nodes name.
    """
    try:
        with _no_custom_backward():
            return _Tracer(leaf).trace(model)
    except LipdpError:
        raise
    except Exception as error:
        place = _line_in(error)
        raise UnsupportedError(f"{type(model).__name__} can't be traced by torch.fx{place}: {error}. {advice}") from error


def describe(node: fx.Node, modules: dict[str, torch.nn.Module]) -> str:
    """How an error message names a node of the graph."""
    if node.op == "call_module":
        target = str(node.target)
        return f"layer '{target}' ({type(modules[target]).__name__})"
    stack = node.meta.get("nn_module_stack") or {}
    owner = next(reversed(stack), "") if stack else ""
    place = f" in the forward of '{owner}'" if owner else " in the model's forward"
    if node.op == "call_function":
        name = getattr(node.target, "__name__", str(node.target))
        if name == "fn":  # torch's pools that may return indices are all called so
            name = next((key for key, value in vars(torch.nn.functional).items() if value is node.target), name)
        return f"function '{name}'{place}"
    if node.op == "call_method":
        return f"tensor method '.{node.target}()'{place}"
    return f"{node.op} '{node.target}'"


def line_of(node: fx.Node) -> str:
    """Where in the user's code a node was written down: file, line and text."""
    return str(node.meta.get(_LINE, "an unknown line"))


def _user_line() -> str:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"line {number} of {Path(file).name}" + (f": {text}" if text else "")


def _line_in(error: BaseException) -> str:
    """The last line of the user's that an error passed through."""
    places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith(_NOT_THE_USERS)]
    return f" ({_line(*own[-1])})" if own else ""


def _tensors(module: torch.nn.Module) -> list[torch.Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def _no_custom_backward() -> Iterator[None]:
    """Refuse torch.autograd.Function while tracing: torch.fx would record its forward and lose its own backward."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            raise UnsupportedError(
                f"the autograd function {cls.__name__} has a backward of its own ({_user_line()}), which the graph does not show "
                "and nothing bounds. Put it into a module and give that module a rule (lipdp.bounds.rule)."
            )
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
