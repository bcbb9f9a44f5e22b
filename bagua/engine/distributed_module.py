"""Functions on a distributed module: pause, average, statistics and state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bagua.engine.hooks import Attachment, attachments
from bagua.engine.inference_mode import outside_inference
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.stats import Stats
from bagua.engine.step_listeners import StepListener

__all__ = ["average_parameters", "load_state_dict", "no_sync", "pause", "resume", "state_dict", "stats"]


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally: backward passes inside this context send nothing.

    The first backward pass after it reduces the accumulated gradients. What counts is where `backward()` runs, not the
    forward pass.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> with bagua.no_sync(model):
        ...     model(inputs).sum().backward()  # accumulates on this rank
        >>> model(inputs).sum().backward()  # averages the sum of both passes over the ranks
        >>> optimizer.step()
    """
    reducer = attachment_of(module).engine.reducer
    before, reducer.sync = reducer.sync, False
    try:
        yield
    finally:
        reducer.sync = before
        if module in attachments:  # another engine may have taken over
            attachments[module].engine.reducer.sync = before


def pause(module: nn.Module) -> None:
    """Pause background communication on this rank until `resume`, for example during evaluation.

    For algorithms that communicate in the background ("async"). An exchange in flight is cancelled, or completed if all
    ranks already take part; the ranks agree on which. The call does not wait for other ranks, which continue to train.
    Call it between steps. It does not change the weights; for their average see `average_parameters`.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> bagua.pause(model)
        >>> loss = model.eval()(inputs).square().mean()  # no background exchange changes the weights
        >>> bagua.resume(model.train())
    """
    attachment_of(module).engine.pause(True)


def resume(module: nn.Module) -> None:
    """Resume background communication after `pause`. Without a `pause` it has no effect.

    It does not wait for other ranks.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> bagua.pause(model)
        >>> bagua.resume(model)
    """
    attachment_of(module).engine.pause(False)


@outside_inference
def average_parameters(module: nn.Module) -> None:
    """Average the weights over all ranks, so that you can evaluate or save one model. Collective.

    For algorithms whose replicas differ, such as "local_sgd" and "async" ("zero_one_adam": during local steps). It has
    no effect if replicas are equal. Buffers and optimizer state do not change, nor do parameters that need no gradient.
    Those that the script updates itself, such as an average of the weights (EMA), differ between ranks where the
    weights do: average them with `torch.distributed`, see docs/faq.md. Ranks may be at different steps; unless the
    algorithm is asynchronous, or `fault_tolerant`, a warning names them.

    With `fault_tolerant` a rank waits up to `max_blocked_s` for the others to call it. If one is lost meanwhile, the
    ranks that are left average among themselves. It takes two more copies of the weights while it runs.

    Raises:
        ValueError: `module` is not distributed.
        CommunicationError: a rank did not call it within the group's timeout. The message names the rank, and no
            weights have changed.

    Examples:
        >>> bagua.average_parameters(model)
        >>> torch.save(model.state_dict(), path)
    """
    attachment = attachment_of(module)
    if attachment.average is None:
        attachment.engine.replicas.average()
    else:
        attachment.average(module)


def stats(module: nn.Module) -> Stats:
    """Return statistics of the module's communication on this rank: bytes, seconds and compression error.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> last = bagua.stats(model).last
        >>> print(f"{last.bytes_sent} bytes sent, {1000 * last.exposed_s:.2f} ms waited")
        0 bytes sent, 0.00 ms waited
    """
    return attachment_of(module).engine.stats()


@outside_inference
def state_dict(module: nn.Module) -> dict[str, Any]:
    """Return this rank's state of the algorithm (step, bucket order, residuals, ...) as tensors and plain data.

    To resume training with the same numbers, save it on every rank with the state dicts of module and optimizers.
    `bagua.checkpoint` does all of this for you.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "bagua": bagua.state_dict(model)}
        >>> torch.save(saved, path)  # a file for each rank
    """
    return attachment_of(module).engine.state_dict()


@outside_inference
def load_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a state that `bagua.state_dict` returned on the same rank.

    Call it on all ranks, after the state of module and optimizers was loaded: with "auto" ranks may communicate.

    Raises:
        TypeError: `state` is no dict.
        ValueError: `module` is not distributed, or the state was saved with another algorithm, other options,
            parameters or optimizers, or another number of ranks.

    Examples:
        >>> saved = bagua.state_dict(model)
        >>> bagua.load_state_dict(model, saved)
    """
    attachment_of(module).engine.load_state_dict(state)


def attached_buckets(module: nn.Module) -> list[Bucket]:
    """Return the buckets of `module` in the order of their exchanges; empty until the first pass has recorded it.

    Raises:
        ValueError: `module` is not distributed.
    """
    return list(attachment_of(module).engine.buckets)


def add_step_listener(module: nn.Module, listener: StepListener) -> None:
    """Call `listener` after each training step of `module`; engines that replace the present one call it too.

    Raises:
        ValueError: `module` is not distributed.
    """
    attachment_of(module).engine.tracker.listeners.add(listener)


def remove_step_listener(module: nn.Module, listener: StepListener) -> None:
    """Stop calling `listener`; no effect if the module is no longer distributed."""
    attachment = attachments.get(module)
    if attachment is not None:
        attachment.engine.tracker.listeners.remove(listener)


def attachment_of(module: nn.Module) -> Attachment:
    """Return the engine and hooks of `module`.

    Raises:
        ValueError: `module` is not distributed.
    """
    try:
        return attachments[module]
    except (KeyError, TypeError):
        raise ValueError(f"{type(module).__name__} is not distributed; call bagua.distribute() first") from None
