"""Which behaviours of torch's own DDP tests are covered by which test here.

Torch's names are those of `torch/testing/_internal/distributed/distributed_test.py` (torch 2.13), where `test_page.py`
looks them up, as it does those of the tests here; "c10d:" are in `test/distributed/test_c10d_*.py`, not installed.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COVERED", "LEFT_OUT", "Covered"]


class Covered(NamedTuple):
    """One behaviour. A test here is a row of the matrix (its function's name), or file::function."""

    behaviour: str
    torch_tests: tuple[str, ...]
    ours: tuple[str, ...]


COVERED = (
    Covered(
        "gradients and weights equal those of one process with the joined batch",
        ("test_DistributedDataParallelCPU", "test_DistributedDataParallelCPU_grad_is_view"),
        ("tests/engine/test_gradients.py::test_equal_to_ddp_to_the_last_bit", "deterministic"),
    ),
    Covered(
        "accumulation under `no_sync`",
        ("c10d: test_accumulate_gradients_no_sync",),
        ("no_sync", "tests/engine/test_unused.py::test_gradients_from_no_sync_alone_are_synchronised"),
    ),
    Covered(
        "forward passes without a backward pass; several in a row",
        ("test_static_graph_multi_forward",),
        ("other_forwards", "many_to_one"),
    ),
    Covered(
        "inference with `eval()` between steps, on one rank alone",
        ("test_ddp_inference",),
        ("other_forwards", "evaluation_mode"),
    ),
    Covered(
        "weights and buffers are rank 0's after construction",
        ("test_ddp_sync_module_states",),
        ("tests/engine/test_lifecycle.py::test_everyone_equals_rank_0", "own_buffers"),
    ),
    Covered(
        "ranks whose modules differ in number or shape of parameters get an error",
        ("test_ddp_model_diff_num_params_across_ranks", "test_ddp_model_diff_shape_across_ranks"),
        ("tests/engine/test_bad_input.py::test_ranks_that_differ",),
    ),
    Covered(
        "unused parameters: the same on all ranks, and others on each",
        ("test_ddp_control_flow_same_across_ranks", "test_ddp_control_flow_different_across_ranks"),
        ("never_used", "used_sets_change", "tests/engine/test_unused.py::test_gradients_are_means_over_all_ranks"),
    ),
    Covered(
        "unused parameters whose accumulators are shared; a rank without any gradient",
        ("test_ddp_shared_grad_acc_unused_params", "test_ddp_update_process_group_grad_undefined"),
        ("rank_without_any", "all_kinds", "tests/engine/test_unused.py::test_a_rank_that_uses_no_parameter_at_all"),
    ),
    Covered(
        "unused parameters without `find_unused_parameters`: an error in DDP, found without being asked for here",
        ("test_ddp_multiple_nested_unused_params_error", "test_ddp_unused_params_rebuild_buckets_exception"),
        ("never_used", "used_sets_change"),
    ),
    Covered(
        "the order of buckets is rebuilt after the first pass, also if it used less than all parameters",
        ("test_ddp_new_tensor_in_fwd",),
        (
            "tests/engine/test_order.py::test_order_is_rank_0s",
            "tests/engine/test_order.py::test_branches_not_seen_in_the_first_step_come_last",
        ),
    ),
    Covered(
        "bucket sizes, one type a bucket",
        ("test_ddp_bucket_cap_mb_list",),
        ("mixed_types", "tests/engine/test_order.py::test_plan"),
    ),
    Covered(
        "parameters with `requires_grad=False`, and ones that change it",
        ("test_DistributedDataParallel_requires_grad", "test_ddp_build_debug_param_to_name_mapping_requires_grad"),
        ("all_kinds", "freeze_later", "unfreeze"),
    ),
    Covered(
        "`_ddp_params_and_buffers_to_ignore`",
        ("test_ddp_ignore_params_arg", "test_ddp_multiple_nested_unused_params_err_ignore_params"),
        ("ignored",),
    ),
    Covered(
        "outputs of nested types and without a gradient",
        ("test_ddp_namedtuple", "test_ddp_returns_tensor_with_no_grad", "test_ddp_static_graph_nested_types"),
        ("nested_outputs", "tests/engine/test_unused.py::test_a_rank_that_uses_no_parameter_at_all"),
    ),
    Covered(
        "static graph: unused parameters, reentrant checkpoints with shared weights, an error if it is none",
        ("test_static_graph_api_cpu", "test_ddp_new_tensor_in_fwd_static_graph", "test_invalid_static_graph"),
        ("static_graph", "static_graph_broken"),
    ),
    Covered(
        "activation checkpointing, reentrant or not, once or twice",
        ("c10d: the checkpointing tests, with and without a static graph",),
        ("checkpointing", "static_graph", "tests/engine/test_unused.py::test_activation_checkpoints"),
    ),
    Covered(
        "`torch.compile` with a static graph or by region",
        ("test_ddp_compile_static_graph",),
        ("compile_after", "compile_before", "compile_regions"),
    ),
    Covered(
        "buffers broadcast before the forward pass, or not; the buffers synchronised at construction in either case",
        ("test_ddp_broadcast_buffer", "test_ddp_init_sync_buffers_with_forward_sync_buffers_false"),
        ("buffers_broadcast", "own_buffers"),
    ),
    Covered(
        "synchronised batch norm: statistics and gradients of the joined batch",
        (
            "test_DistributedDataParallel_SyncBatchNorm",
            "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
            "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
            "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
            "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
            "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
            "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
            "test_DistributedDataParallel_SyncBatchNorm_half",
            "test_ddp_sync_bn_training_vs_eval",
        ),
        ("sync_batch_norm", "tests/nn/test_sync_batch_norm.py::test_equal_to_the_joined_batch"),
    ),
    Covered(
        "uneven inputs: `join`, its division, its equivalence, disabled, with buffers, with an exception",
        (
            "test_ddp_uneven_inputs",
            "test_ddp_grad_div_uneven_inputs",
            "test_ddp_join_model_equivalence",
            "test_ddp_uneven_input_join_disable",
            "test_ddp_join_respects_forward_sync_buffers_false",
            "test_ddp_uneven_input_exception",
            "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        ),
        ("join", "join_more", "join_divided", "join_early", "join_even"),
    ),
    Covered(
        "sparse gradients of embeddings",
        ("c10d: test_sparse_gradients_grad_is_view",),
        ("sparse_embedding", "tied_embedding"),
    ),
    Covered(
        "mixed precision: autocast with a scaler, gradients in a type of their own",
        ("test_DistributedDataParallel_with_amp_and_grad_is_view",),
        ("autocast", "half_parameters", "torch_scaler", "agreeing_scaler", "disabled_scaler"),
    ),
    Covered(
        "several optimizers and groups; gradients as views with `zero_grad` in both settings",
        ("test_ddp_apply_optim_in_backward_grad_as_bucket_view_false", "test_ddp_hook_with_optimizer_parity_sgd"),
        ("several_optimizers", "groups", "zero_grad"),
    ),
    Covered(
        "gradients in the memory format of their parameters",
        ("c10d: the tests of gradient layouts",),
        ("tests/engine/test_gradients.py::test_gradients_keep_the_memory_format",),
    ),
    Covered(
        "save, load, deep copies and `pickle` of the module",
        ("test_ddp_hook_pickling_powerSGD", "c10d: the test of saving and loading a checkpoint"),
        ("copies", "state_dict"),
    ),
    Covered(
        "hooks can be removed; nothing is left behind",
        ("test_ddp_remove_autograd_hooks", "test_ddp_has_finalized"),
        ("no_leaks", "tests/engine/test_lifecycle.py::test_detach"),
    ),
    Covered(
        "an exception in the backward pass or in the loop, and training after it",
        ("test_ddp_python_error_logged",),
        ("broken_off", "tests/engine/test_failures.py::test_training_goes_on_after_an_exception_in_backward"),
    ),
    Covered(
        "two modules in one loss; one module's loss through another",
        ("c10d: test_multiple_outputs_multiple_backward",),
        ("gan", "one_optimizer", "several_backwards"),
    ),
    Covered(
        "`torch.autograd.grad` and double backward",
        ("test_ddp_create_graph",),
        ("gradient_penalty",),
    ),
    Covered(
        "a device mesh instead of a group",
        ("test_ddp_device_mesh_initialization",),
        ("tests/interop/test_device_mesh.py::test_slices_of_a_mesh_are_groups",),
    ),
)

LEFT_OUT = (
    ("Communication hooks", "test_ddp_hook_parity_*", "an algorithm chooses; `bagua.interop.ddp_hook`"),
    ("Optimizers in the backward pass", "test_ddp_apply_optim_in_backward", "not offered"),
    ("DDP's own mixed precision", "test_ddp_native_mixed_precision_*", "autocast, or 16-bit parameters, do it"),
    ("Logging data of the C++ logger", "test_ddp_logging_data_*", "`bagua.stats` instead"),
    ("`_update_process_group`", "test_ddp_update_process_group_*", "`distribute` with another group"),
    ("Stateless calls (`functional_call`)", "test_stateless_api_with_ddp", "its gradients are not the module's"),
)
