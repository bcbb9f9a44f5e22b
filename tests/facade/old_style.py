"""Algorithms as scripts for Bagua 0.9 define them: on tensors, buckets and hooks, with nothing of this package's own.

The last one is the tutorial's: gradients are averaged in a first stage, and in the second stage each rank adds its own
gradient to its momentum and the momenta are averaged, in 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket


class MeanOfGradients(Algorithm):
    """Overrides nothing but the operations."""

    def __init__(self, hierarchical: bool = False, average: bool = True, compression: str | None = None) -> None:
        self.hierarchical, self.average, self.compression = hierarchical, average, compression

    def reify(self, process_group: Any) -> MeanOfGradientsImpl:
        return MeanOfGradientsImpl(process_group, self)


class MeanOfGradientsImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, options: MeanOfGradients) -> None:
        super().__init__(process_group)
        self.options = options

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        ranks = self.process_group.get_global_communicator().nranks()
        return [
            BaguaBucket(group, flatten=do_flatten, name=str(index), alignment=ranks)
            for index, group in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.options.hierarchical,
            average=self.options.average,
            scattergather=self.options.compression is not None,
            compression=self.options.compression,
            group=self.process_group,
        )


class PeerWeights(Algorithm):
    """Weights are averaged beside forward and backward pass, and taken over before the optimizer's step."""

    def __init__(self, mode: str = "all", interval: int = 1, hierarchical: bool = False) -> None:
        self.mode, self.interval, self.hierarchical = mode, interval, hierarchical

    def reify(self, process_group: Any) -> PeerWeightsImpl:
        return PeerWeightsImpl(process_group, self)


class PeerWeightsImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, options: Any) -> None:
        super().__init__(process_group)
        self.options = options
        self.tensors: list[Any] = []

    def due(self, bagua_ddp: Any) -> bool:
        return (bagua_ddp.bagua_train_step_counter - 1) % self.options.interval == 0

    def init_tensors(self, bagua_ddp: Any) -> Any:
        named = list(reversed(bagua_ddp.bagua_build_params()))
        self.tensors = [param.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name) for name, param in named]
        return self.tensors

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        everything = [tensor for group in tensors for tensor in group]
        return [BaguaBucket(everything, flatten=do_flatten, name="0")]

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Any:
        def mark(inputs: Any) -> None:
            assert isinstance(inputs, tuple) and isinstance(inputs[0], torch.Tensor)
            if self.due(bagua_ddp):
                for tensor in self.tensors:
                    tensor.bagua_mark_communication_ready()

        return mark

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        def take_over() -> None:
            if self.due(bagua_ddp):
                bagua_ddp._bagua_backend.wait_pending_comm_ops()
                for bucket in bagua_ddp.bagua_buckets:
                    bucket._mean.copy_back_peer_weight(bucket.backend_bucket)

        return take_over

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket._peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer_weight")
        bucket._mean = bucket.append_decentralized_synchronous_op(
            peer_weight=bucket._peer_weight,
            hierarchical=self.options.hierarchical,
            peer_selection_mode=self.options.mode,
            group=self.process_group,
        )


class RingOfDifferences(PeerWeights):
    """After the optimizer's step: 8-bit differences with both neighbours."""

    def reify(self, process_group: Any) -> RingOfDifferencesImpl:
        return RingOfDifferencesImpl(process_group, self)


class RingOfDifferencesImpl(PeerWeightsImpl):
    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        return AlgorithmImpl.tensors_to_buckets(self, tensors, do_flatten)

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Any:
        return lambda inputs: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Any:
        def gossip(optimizer: torch.optim.Optimizer) -> None:
            if self.due(bagua_ddp):
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        if param.is_bagua_tensor():
                            param.bagua_mark_communication_ready()
                bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return gossip

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket._weight = bucket.flattened_tensor().ensure_bagua_tensor("weight")
        bucket._left = bucket.flattened_tensor().ensure_bagua_tensor("left_peer_weight")
        bucket._right = bucket.flattened_tensor().ensure_bagua_tensor("right_peer_weight")
        bucket.append_low_precision_decentralized_synchronous_op(
            weight=bucket._weight,
            left_peer_weight=bucket._left,
            right_peer_weight=bucket._right,
            hierarchical=self.options.hierarchical,
            group=self.process_group,
        )


class TwoStageAdam(torch.optim.Optimizer):
    """The tutorial's optimizer, with its formulas: x -= lr m / (sqrt(v) + eps), v fixed after the warm-up."""

    def __init__(self, params: Any, lr: float, warmup_steps: int, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 0.1})
        self.warmup_steps, self.step_id = warmup_steps, 0
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"m": torch.zeros_like(param.data), "v": torch.zeros_like(param.data)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        warm = self.step_id < self.warmup_steps
        self.step_id += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                m, v = self.state[param]["m"], self.state[param]["v"]
                if warm:
                    m.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                    v.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                param.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"])


class MomentaInEightBits(Algorithm):
    """The tutorial's algorithm."""

    def __init__(self, optimizer: TwoStageAdam, hierarchical: bool = False, compression: str | None = "MinMaxUInt8"):
        self.optimizer, self.hierarchical, self.compression = optimizer, hierarchical, compression

    def reify(self, process_group: Any) -> MomentaInEightBitsImpl:
        return MomentaInEightBitsImpl(process_group, self)


class MomentaInEightBitsImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, options: MomentaInEightBits) -> None:
        super().__init__(process_group)
        self.options, self.optimizer = options, options.optimizer

    @property
    def warm(self) -> bool:
        return self.optimizer.step_id < self.optimizer.warmup_steps

    def need_reset(self) -> bool:
        return self.optimizer.step_id == self.optimizer.warmup_steps

    def init_tensors(self, bagua_ddp: Any) -> Any:
        state = self.optimizer.state
        if self.warm:
            return super().init_tensors(bagua_ddp)

        def put(param: Any, momentum: torch.Tensor) -> None:
            state[param]["m"] = momentum

        return [
            param.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name, lambda param: state[param]["m"], put)
            for name, param in reversed(bagua_ddp.bagua_build_params())
        ]

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.clear_ops()
        if self.warm:
            bucket.append_centralized_synchronous_op()
            return

        def add_gradients(name: str) -> None:
            assert name == bucket.name
            beta1, _ = self.optimizer.param_groups[0]["betas"]
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(beta1).add_(tensor.grad, alpha=1 - beta1)

        bucket.append_python_op(add_gradients, group=self.process_group)
        bucket.append_centralized_synchronous_op(
            hierarchical=self.options.hierarchical,
            scattergather=True,
            compression=self.options.compression,
            group=self.process_group,
        )

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        effective = "gradient" if self.warm else "momentum"

        def mark(name: str, parameter: Any) -> None:
            expected = parameter.grad if effective == "gradient" else self.optimizer.state[parameter]["m"]
            assert parameter.bagua_backend_tensor().data_ptr() == expected.data_ptr()
            parameter.bagua_mark_communication_ready()

        return mark
