"""Minimal definitions of the models that the synthetic benchmark and the examples train."""

from __future__ import annotations

from bagua.sys_perf.models.bert import Bert, BertConfig, BertForPreTraining
from bagua.sys_perf.models.resnet import ResNet
from bagua.sys_perf.models.vgg import VGG16

__all__ = ["VGG16", "Bert", "BertConfig", "BertForPreTraining", "ResNet"]
