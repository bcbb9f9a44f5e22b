"""Which parameters of an FSDP2 module the flat gradient of one reduction holds.

FSDP leaves out parameters without a gradient, and hands its communication hooks the flat gradient only. Two sets of
parameters may have the same number of elements, so the number does not say which ones they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["ReducedParams", "without_wrappers"]

_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}  # attributes of torch's checkpoint_wrapper and compile
_GROUP = ("fsdp_params", "post_backward")
_PARAM = ("_module_info", "unsharded_accumulated_grad", "padded_sharded_param_size", "sharded_param")


def without_wrappers(path: str) -> str:
    """The path of a module or parameter as if activation checkpointing and `torch.compile` had wrapped nothing."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


class ReducedParams:
    """The parameters that one FSDP module has reduced last; known from before its hooks are called.

    Attributes:
        widths: elements of one rank's shard, with padding, by name of the parameter; in the order of flat gradients.
    """

    def __init__(self, module: nn.Module, paths: Mapping[int, str]) -> None:
        """Follow the reductions of `module`.

        Args:
            paths: of the model's modules, without wrappers, by `id`.

        Raises:
            RuntimeError: this torch does not show them.
        """
        state: Any = module
        group = state._get_fsdp_state()._fsdp_param_group
        self._params: list[Any] = list(getattr(group, "fsdp_params", ()))
        lacks = [name for name in _GROUP if group is not None and not hasattr(group, name)]
        lacks += [name for name in _PARAM for param in self._params[:1] if not hasattr(param, name)]
        if lacks:
            raise RuntimeError(
                f"torch {torch.__version__} does not show which parameters FSDP reduces (no {lacks[0]}); pass "
                "error_feedback=False, and no replica"
            )
        self._names = [self._name(param, paths) for param in self._params]
        self.widths = {
            name: param.padded_sharded_param_size.numel() for name, param in zip(self._names, self._params, strict=True)
        }
        self._last: tuple[str, ...] = ()
        if group is not None:
            self._follow(group)

    def all_of(self, num_elements: int, path: str) -> tuple[str, ...]:
        """Names of all parameters that can be reduced, if a rank's shard of them has `num_elements`.

        Args:
            path: of the module, for the message.

        Raises:
            ValueError: it has more or fewer.
        """
        pairs = zip(self._names, self._params, strict=True)
        names = tuple(name for name, param in pairs if param.sharded_param.requires_grad)
        total = sum(self.widths[name] for name in names)
        if num_elements != total:
            raise ValueError(
                f"state dict: an earlier version saved a state for {num_elements} of {total} elements of module "
                f"{path!r} and not for which parameters; load the checkpoint without the state of compress_fsdp"
            )
        return names

    def names_of(self, saved: Iterable[str], path: str) -> tuple[str, ...]:
        """The names here of saved ones, which may name wrappers.

        Raises:
            ValueError: the module `path` has no such parameter; names it.
        """
        names = list[str]()
        for name in saved:
            names.append(without_wrappers(name))
            if names[-1] not in self.widths:
                raise ValueError(f"state dict: module {path!r} has no parameter {name!r}")
        return tuple(names)

    def of_shard(self, num_elements: int) -> tuple[str, ...]:
        """Names of the parameters in the reduction that is in progress, of which a rank's shard has `num_elements`.

        Raises:
            RuntimeError: they have another number of elements.
        """
        total = sum(self.widths[name] for name in self._last)
        if total != num_elements:
            raise RuntimeError(
                f"FSDP reduces shards of {num_elements} elements, but the parameters with a gradient "
                f"({', '.join(self._last) or 'none'}) have {total}; pass error_feedback=False, and no replica"
            )
        return self._last

    def _follow(self, group: Any) -> None:
        unobserved = group.post_backward  # takes the gradients away, and then calls the hooks

        def observed(*args: Any) -> None:
            zeros = getattr(group, "reduce_scatter_unused_params", False)
            # From torch 2.15 on gradients of one dtype are beside each other.
            order = getattr(group, "_reduce_scatter_param_indices", None) or range(len(self._params))
            self._last = tuple(self._names[i] for i in order if _has_gradient(self._params[i], zeros))
            unobserved(*args)

        group.post_backward = observed

    @staticmethod
    def _name(param: Any, paths: Mapping[int, str]) -> str:
        info = param._module_info
        path = paths.get(id(info.module), "")
        return f"{path}.{info.param_name}" if path else info.param_name


def _has_gradient(param: Any, zeros: bool) -> bool:
    """Whether FSDP reduces `param`; with `zeros` if it has none, too."""
    unsharded = getattr(param, "_unsharded_param", None)  # made by the first forward pass
    if unsharded is None:
        return False
    return (
        param.unsharded_accumulated_grad is not None
        or unsharded.grad is not None
        or (zeros and unsharded.requires_grad)
    )
