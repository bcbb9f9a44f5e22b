"""Parameters and buffers that a rank keeps for itself, such as the experts of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["is_rank_local", "mark_rank_local", "rank_local_names"]

_MARK = "bagua_rank_local"
_EXPERT = "expert"  # Bagua 0.9's, on parameters


def mark_rank_local(target: nn.Module | Tensor) -> None:
    """Have `bagua.distribute` leave `target` to its rank; call it before.

    What is marked is neither compared between ranks, nor broadcast, exchanged, averaged or checked, under any
    algorithm; it may differ in number and shape, and its optimizer state stays the rank's own. Its gradient is left as
    the rank's backward pass makes it. The mark is the attribute `bagua_rank_local`, which a class may have as well.

    Args:
        target: a module, for all parameters and buffers in it, those that come later included; or a parameter or
            buffer, whose mark `copy.deepcopy` and, of a buffer, `module.to()` lose.

    Examples:
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> bagua.moe.mark_rank_local(module[0])
        >>> module = bagua.distribute(module, torch.optim.SGD(module.parameters(), lr=0.1))
    """
    setattr(target, _MARK, True)


def is_rank_local(tensor: Tensor) -> bool:
    """Whether the tensor itself is marked, by `bagua_rank_local` or by Bagua 0.9's `expert`."""
    return bool(getattr(tensor, _MARK, False) or getattr(tensor, _EXPERT, False))


def rank_local_names(module: nn.Module) -> set[str]:
    """Names of the marked parameters and buffers; of tied ones all names, if they are marked anywhere."""
    marked = {id(tensor) for _, tensor, is_marked in _tensors(module, "", False) if is_marked}
    return {name for name, tensor, _ in _tensors(module, "", False) if id(tensor) in marked} if marked else set()


def _tensors(module: nn.Module, prefix: str, is_marked: bool) -> Iterator[tuple[str, Tensor, bool]]:
    is_marked = is_marked or bool(module.__dict__.get(_MARK, getattr(type(module), _MARK, False)))
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield prefix + name, tensor, is_marked or is_rank_local(tensor)
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.", is_marked)
