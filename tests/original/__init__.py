"""The ideas of each test file of Bagua 0.9.2 (BaguaSys/bagua, commit 3e480d29), through the facade's names.

`SOURCES` says where each of its files went. Ours are written anew and run on CPUs, with ranks from the pool. Its
`tests/internal` is a harness without tests.
"""

from __future__ import annotations

# File of the original -> files of ours that hold its ideas.
SOURCES = {
    "comm/test_communicator.py": ["original/test_communicator.py"],
    "contrib/test_cached_dataset.py": ["original/test_stores.py"],
    "contrib/test_fused_optimizer.py": ["original/test_fused_optimizer.py"],
    "contrib/test_load_balancing_data_loader.py": ["original/test_load_balancing.py"],
    "contrib/test_store.py": ["original/test_stores.py"],
    "contrib/test_sync_bn.py": ["original/test_sync_bn.py"],
    "pytorch_lightning/test_bagua_strategy.py": ["lightning/test_training.py", "lightning/test_arguments.py"],
    "service/test_autotune_service.py": ["original/test_service.py"],
    "service/test_bayesian_optimizer.py": ["original/test_service.py"],
    "test_bagua_define.py": ["original/test_service.py"],
    "torch_api/data_parallel/test_async_model_average.py": ["original/test_bagua_module.py"],
    "torch_api/data_parallel/test_bagua_ddp.py": ["original/test_bagua_ddp.py"],
    "torch_api/data_parallel/test_bagua_module.py": ["original/test_bagua_module.py"],
    "torch_api/data_parallel/test_broadcast_state.py": ["original/test_broadcast_state.py"],
    "torch_api/data_parallel/test_c10d_common.py": ["original/test_bagua_ddp.py"],
    "torch_api/data_parallel/test_decentralized.py": ["original/test_decentralized.py"],
    "torch_api/data_parallel/test_gradient_allreduce.py": ["original/test_gradient_allreduce.py"],
    "torch_api/data_parallel/test_low_precision_decentralized.py": ["original/test_low_precision_decentralized.py"],
    "torch_api/data_parallel/test_multi_models.py": ["original/test_multi_models.py"],
    "torch_api/test_async_model_average.py": ["original/test_bagua_module.py"],
    "torch_api/test_bagua_module.py": ["original/test_bagua_module.py"],
    "torch_api/test_broadcast_state.py": ["original/test_broadcast_state.py"],
    "torch_api/test_decentralized.py": ["original/test_decentralized.py"],
    "torch_api/test_gradient_allreduce.py": ["original/test_gradient_allreduce.py"],
    "torch_api/test_low_precision_decentralized.py": ["original/test_low_precision_decentralized.py"],
    "torch_api/test_multi_models.py": ["original/test_multi_models.py"],
    "torch_api/test_process_group.py": ["original/test_process_group.py"],
    "torch_api/test_qadam.py": ["original/test_qadam.py"],
    "torch_api/test_utils.py": ["original/test_service.py"],
}

# Parts that have no counterpart, and why.
LEFT_OUT = {
    "torch_api/test_process_group.py: the map of patched groups": "from_torch_group keeps none; groups are not patched",
    "torch_api/data_parallel/test_c10d_common.py: stores, rendezvous, hooks of DDP": "they are torch's tests of torch",
    "service/test_autotune_service.py: requests to the server": "there is no server; the names say so",
    "comm/test_communicator.py: NCCL_PROTO, streams": "CUDA only",
    "pytorch_lightning/test_bagua_strategy.py: norms of weights": "they are those of one GPU",
}
