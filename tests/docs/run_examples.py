"""Run the examples in docstrings of public names, in a process of one rank; prints what failed as JSON.

Every example starts with what `bagua.distribute` shows: a distributed `model`, its `optimizer`, `inputs` and a `path`.
"""

from __future__ import annotations

import doctest
import inspect
import io
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

import bagua


def namespace(folder: str) -> dict[str, object]:
    bagua.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, "bytegrad")
    inputs = torch.randn(4, 10)
    model(inputs).sum().backward()
    optimizer.step()
    given = {"model": model, "optimizer": optimizer, "inputs": inputs, "path": str(Path(folder) / "file.pt")}
    return {"bagua": bagua, "torch": torch, **given}


def examples(name: str) -> list[doctest.Example]:
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(import_module(module), attribute)) or ""
    return doctest.DocTestParser().get_examples(text.split("\nExamples:\n", 1)[1]) if "\nExamples:\n" in text else []


def run(name: str) -> str:
    """Return "" or what went wrong."""
    found, report = examples(name), io.StringIO()
    if not found:
        return f"{name} has no examples"
    with tempfile.TemporaryDirectory() as folder:
        test = doctest.DocTest(found, namespace(folder), name, None, None, None)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=report.write, clear_globs=False)
    bagua.destroy_process_group()
    return report.getvalue() if runner.failures else ""


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
