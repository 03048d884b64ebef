"""Which implementation of an operator runs: plain torch, the compiled CPU code, or CUDA.

Every operator has a plain-torch *reference*, registered here by the file that defines it. A
compiled implementation exists when the extension `longspark_sglang._C` was built with it; it is
called through `torch.ops.longspark.<op>` with the same arguments. `auto` takes the compiled
implementation of the tensors' device if there is one and the reference otherwise, and says so once
per operator.

The environment variable LONGSPARK_OPS_BACKEND replaces `auto` (an explicit `backend=` argument
wins).
"""

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from . import fakes

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "cuda")
BACKEND_VARIABLE = "LONGSPARK_OPS_BACKEND"
_COMPILED_KEY = {"cpu": "CPU", "cuda": "CUDA"}

_references: dict[str, Callable[..., Any]] = {}
_resolved: dict[tuple[str, str, str], Callable[..., Any]] = {}
_extension_problem: str | None = None
_extension_loaded: bool | None = None


class BackendError(RuntimeError):
    """The asked-for backend doesn't exist, wasn't built, or can't run on these tensors."""


def reference(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register the plain-torch implementation of `op`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if op in _references:
            raise ValueError(f"operator {op!r} has two references")
        _references[op] = function
        return function

    return register


def operators() -> list[str]:
    """Names of all operators, sorted."""
    return sorted(_references)


def load_extension() -> bool:
    """Load the compiled operators once; True when they are there. Never raises."""
    global _extension_loaded, _extension_problem
    if _extension_loaded is None:
        try:
            importlib.import_module("longspark_sglang._C")
            fakes.register("longspark")
            _extension_loaded = True
        except ModuleNotFoundError as error:
            if error.name != "longspark_sglang._C":
                raise
            _extension_loaded, _extension_problem = False, "the extension was not built"
        except ImportError as error:
            # Typically a torch of another version than the one it was compiled against.
            _extension_loaded = False
            _extension_problem = f"the extension can't be loaded ({error}); rebuild it"
    return _extension_loaded


def is_compiled(op: str, backend: str) -> bool:
    """Whether the extension holds `op` for `backend` ("cpu" or "cuda")."""
    if not load_extension():
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"longspark::{op}", _COMPILED_KEY[backend]
    )


def _why_not(op: str, backend: str) -> str:
    if not load_extension():
        return _extension_problem or "the extension was not built"
    return f"the extension was built without a {backend} implementation of {op}"


def _asked_for(backend: str) -> str:
    chosen = os.environ.get(BACKEND_VARIABLE, "auto") if backend == "auto" else backend
    if chosen not in BACKENDS:
        source = BACKEND_VARIABLE if backend == "auto" else "backend"
        raise BackendError(f"{source} is {chosen!r}; use one of {', '.join(BACKENDS)}")
    return chosen


def choose(op: str, device_type: str, backend: str = "auto") -> tuple[str, str]:
    """The backend that serves `op` on tensors of `device_type`, and why.

    Returns:
        (backend, reason), backend one of "reference", "cpu", "cuda".
    Raises:
        BackendError: an explicit backend that isn't built or doesn't match the device.
    """
    if op not in _references:
        raise BackendError(f"there is no operator {op!r}; there are {', '.join(operators())}")
    chosen = _asked_for(backend)
    if chosen == "reference":
        return "reference", "asked for"
    if chosen == "auto":
        if device_type in _COMPILED_KEY:
            if is_compiled(op, device_type):
                return device_type, "compiled"
            return "reference", _why_not(op, device_type)
        return "reference", f"nothing is compiled for device type {device_type}"
    if chosen != device_type:
        raise BackendError(
            f"{op}: backend {chosen!r} was asked for, but the tensors are on {device_type!r}"
        )
    if not is_compiled(op, chosen):
        raise BackendError(
            f"{op}: backend {chosen!r} was asked for, but {_why_not(op, chosen)}; "
            f"reinstall with LONGSPARK_BUILD={chosen}, or use backend 'reference'"
        )
    return chosen, "asked for"


def resolve(op: str, device: torch.device, backend: str = "auto") -> Callable[..., Any]:
    """The function that serves `op` on `device`; logs the choice once per operator and device."""
    key = (op, device.type, backend)
    function = _resolved.get(key)
    if function is None:
        chosen, reason = choose(op, device.type, backend)
        # A fallback from `auto` is news to whoever expects speed; a choice as wished isn't.
        level = logging.WARNING if chosen == "reference" and reason != "asked for" else logging.INFO
        logger.log(level, "longspark.%s on %s: %s (%s)", op, device.type, chosen, reason)
        if chosen == "reference":
            function = _references[op]
        else:
            function = getattr(torch.ops.longspark, op).default
        _resolved[key] = function
    return function


def forget_choices() -> None:
    """Choose anew on the next call (after LONGSPARK_OPS_BACKEND changed)."""
    _resolved.clear()


def sources(device_type: str | None = None) -> dict[str, str]:
    """Operator -> backend that `auto` takes on `device_type` (default: cuda if present, else cpu).

    For the start-up line; chooses, but neither logs nor runs anything.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {op: choose(op, device_type)[0] for op in operators()}
