"""A user's script. mypy and pyright must take it without an error; it is not run."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import bagua
from bagua import codecs
from lightning_bagua import BaguaStrategy


def train() -> None:
    bagua.init_process_group()
    model = torch.nn.Linear(4, 2)
    optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3)
    assert_type(bagua.distribute(model, optimizer, bagua.algorithms.ByteGrad(average=True)), torch.nn.Linear)
    with bagua.no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    assert_type(bagua.stats(model), bagua.Stats)
    assert_type(bagua.stats(model).total.bytes_sent, int)
    assert_type(bagua.stats(model).notices, tuple[str, ...])
    assert_type(bagua.metrics.report(model, [print, "metrics.csv"], ranks="all"), bagua.metrics.Report)
    assert_type(bagua.metrics.scalars(bagua.stats(model)), dict[str, float])
    assert_type(bagua.Autotune(max_samples=3), bagua.Autotune)
    assert_type(codecs.MinMaxUInt8(block=None), codecs.MinMaxUInt8)
    assert_type(bagua.__version__, str)
    assert_type(BaguaStrategy(algorithm="bytegrad"), BaguaStrategy)


def names_behind_a_lazy_import() -> None:
    assert_type(bagua.interop.ddp_hook("bytegrad").bytes_sent, int)
    assert_type(bagua.errors.CommunicationError("lost"), bagua.CommunicationError)
    model = torch.nn.Linear(1, 1)
    assert_type(bagua.elastic.State(model, bagua.optim.QAdam(model.parameters())), bagua.elastic.State)
    assert_type(bagua.simulation.Simulation, type[bagua.Simulation])
