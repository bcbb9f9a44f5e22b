"""Sinks for experiment loggers, which are recognised by their methods."""

from __future__ import annotations

import inspect
from typing import Any

from bagua.engine import Stats
from bagua.metrics.catalogue import scalars
from bagua.metrics.sink import Sink

__all__ = ["Logger", "TensorBoard", "takes_a_dict_and_a_step"]


class TensorBoard(Sink):
    """Writes scalars with `writer.add_scalar(tag, value, global_step=steps)`.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, one of tensorboardX, or any object with this method.
        prefix: of all tags. TensorBoard groups charts by what precedes the slash.

    Raises:
        TypeError: `writer` has no such method.

    Examples:
        >>> from types import SimpleNamespace
        >>> writer = SimpleNamespace(add_scalar=lambda tag, value, global_step: None)  # stands for a SummaryWriter
        >>> report = bagua.metrics.report(model, to=bagua.metrics.TensorBoard(writer, prefix="net/generator_"))
        >>> report.close()
    """

    def __init__(self, writer: Any, prefix: str = "bagua/") -> None:
        if isinstance(writer, type) or not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer: expected an object with add_scalar(), got {_said(writer)}")
        self._writer, self._prefix = writer, prefix

    def __repr__(self) -> str:
        return f"TensorBoard({type(self._writer).__name__})"

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        for key, value in scalars(stats, since).items():
            self._writer.add_scalar(self._prefix + key, value, global_step=stats.steps)


class Logger(Sink):
    """Passes one flat dict to `logger.log_metrics(values, step=steps)`, or to `logger.log` if it has no `log_metrics`.

    `log_metrics`: Lightning's loggers, the module `mlflow`. `log`: a run of Weights & Biases or the module `wandb`,
    Accelerate's `Accelerator`.

    Args:
        logger: an object with one of these methods.
        prefix: of all keys.
        step: False leaves out the argument `step`. Weights & Biases drops values whose step is less than one that it
            has seen; leave it out if your script logs with steps of another kind, and plot over the key `steps`.

    Raises:
        TypeError: `logger` has no such method.

    Examples:
        >>> from types import SimpleNamespace
        >>> run = SimpleNamespace(log=lambda values, step=None: print(step, values["bagua/steps"]))
        >>> report = bagua.metrics.report(model, to=bagua.metrics.Logger(run, step=False), every=1)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        None 2
        >>> report.close()
    """

    def __init__(self, logger: Any, prefix: str = "bagua/", step: bool = True) -> None:
        name = next((each for each in ("log_metrics", "log") if takes_a_dict_and_a_step(logger, each)), None)
        if name is None:
            raise TypeError(
                f"logger: expected an object with log_metrics(dict, step=) or log(dict, step=), got {_said(logger)}"
            )
        self._name, self._logger, self._prefix, self._step = name, logger, prefix, step

    def __repr__(self) -> str:
        return f"Logger({_said(self._logger)})"

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        values = {self._prefix + key: value for key, value in scalars(stats, since).items()}
        log = getattr(self._logger, self._name)  # of a module, it may have been another one when the report began
        log(values, **({"step": stats.steps} if self._step else {}))


def takes_a_dict_and_a_step(value: Any, name: str) -> bool:
    """Whether `value.name(dict, step=...)` can be called. `logging.Logger.log` and `torch.Tensor.log` cannot."""
    method = None if isinstance(value, type) else getattr(value, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind({}, step=0)
    except ValueError:  # it has no signature to look at
        return not isinstance(method, type(len))
    except TypeError:
        return False
    return True


def _said(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__
