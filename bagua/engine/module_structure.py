"""Detects parameters that were added after `distribute`, which no bucket would synchronise."""

from __future__ import annotations

import operator
import sys
from itertools import chain, count
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import stateless

from bagua.engine.startup.inventory import Inventory, ignored_names
from bagua.engine.torch_wrappers import INSTEAD, torch_wrapper

__all__ = ["Structure"]

_SLICE = 16  # submodules that are compared one by one in a step
_registrations = 0  # the latest, of a parameter or submodule anywhere in this process
_numbers = count(1)
_handles: list[Any] = []
_CALL = stateless._functional_call.__code__


def _registered(*_: Any) -> None:
    global _registrations
    _registrations = next(_numbers)


class Structure:
    """The parameters that a module had when it was distributed.

    torch tells of every parameter and submodule that is registered; only then is the whole module looked at. What
    was written into a submodule's dictionary of parameters, past torch, is found within some steps: a few submodules
    are compared in each. The module itself is not held, nor any of its submodules.
    """

    def __init__(self, module: nn.Module, inventory: Inventory) -> None:
        if not _handles:
            _handles.append(torch_module.register_module_parameter_registration_hook(_registered))
            _handles.append(torch_module.register_module_module_registration_hook(_registered))
        self._known = {id(param) for param in (*inventory.parameters.values(), *inventory.frozen.values())}
        self._kept = inventory  # so that no address recurs
        self._class = type(module)
        self._turn = 0
        self._read(module)

    def check(self, module: nn.Module) -> None:
        """Before a forward pass in training mode.

        Raises:
            RuntimeError: a wrapper of torch reduces gradients of the module too by now, or a parameter that requires a
                gradient was added or took the place of another; names it.
        """
        if self._seen == _registrations and type(module) is self._class and self._slice_is_unchanged():
            return
        if _in_functional_call():
            return  # parameters of the caller's, for the time of the call
        for path, part in module.named_modules():
            wrapper = torch_wrapper(part)
            if wrapper is not None:
                where = f"its part {path!r}" if path else "it"
                raise RuntimeError(
                    f"module: {where} {wrapper} after bagua.distribute(), which exchanges gradients itself; {INSTEAD}"
                )
        self._class = type(module)
        ignored = ignored_names(module)
        for name, param in module.named_parameters():
            if id(param) in self._known or name in ignored or not param.requires_grad:
                continue
            if isinstance(param, nn.Parameter) and param.is_leaf:
                raise RuntimeError(
                    f"parameter {name!r} was added or replaced after bagua.distribute(), and would be trained on this "
                    "rank alone (a new submodule, load_state_dict(assign=True), a parametrization); "
                    "call bagua.distribute() again with its optimizers, on all ranks"
                )
        self._read(module)

    def _read(self, module: nn.Module) -> None:
        self._seen = _registrations
        tables = [each._parameters for each in module.modules() if each._parameters]
        self._slices = [
            (part, list(chain.from_iterable(map(dict.values, part))))
            for part in (tables[lo : lo + _SLICE] for lo in range(0, len(tables), _SLICE))
        ]

    def _slice_is_unchanged(self) -> bool:
        tables, params = self._slices[self._turn % len(self._slices)]
        self._turn += 1
        now = list(chain.from_iterable(map(dict.values, tables)))
        return len(now) == len(params) and all(map(operator.is_, now, params))


def _in_functional_call() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False
