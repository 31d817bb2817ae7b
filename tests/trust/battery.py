"""All cases, and which of them cannot be one captured graph."""

from __future__ import annotations

from collections.abc import Sequence

from tests.trust import (
    aliases,
    batches,
    burned_in,
    carried,
    code_changed,
    data,
    derivatives,
    equal_layers,
    held_by_modules,
    hooks,
    idioms,
    interrupted,
    left_behind,
    loops,
    numbers,
    objectives,
    objects,
    opaque,
    optimizers,
    outside,
    protocols,
    python_values,
    randomness,
    recipes,
    refusals,
    stale_cache,
    structure,
    switches,
    techniques,
    updates,
    values_read,
)
from tests.trust.case import CASES, Case

__all__ = ["CASES", "FILES", "LOUD", "chosen"]

FILES = (
    burned_in, values_read, code_changed, outside, structure, left_behind, carried, optimizers, hooks, randomness, data,
    python_values, loops, interrupted, stale_cache, refusals, equal_layers, aliases, switches, techniques, updates,
    objects, protocols, opaque, idioms, recipes, held_by_modules, batches, derivatives,
    objectives, numbers,
)  # fmt: skip

LOUD: dict[str, str] = {
    "functional_patched": "replaced",
    "step_patched_on_the_instance": "step",
    "optimizer_of_ones_own": "Sign",
    "subclass_that_looks_ahead": "Lookahead",
    "radam": "RAdam",
    "hook_before_the_update": "hook",
    "hook_after_the_update": "hook",
    "post_accumulate_hook_clips": "hook",
    "post_accumulate_hook_added_later": "hook",
    "parameter_with_a_late_hook_takes_the_place_of_another": "hook",
    "optimizer_in_the_backward": "hook",
    "backward_inside_the_loss": "backward",
    "part_that_disables_compilers": "disable",
    "data_parallel": "DataParallel",
    "parameter_outside_the_modules": "parameter",
    "part_of_the_batch_shares_memory_later": "shares memory",
    "part_of_the_batch_shares_memory_at_first": "shares memory",
    "features_computed_before_the_step": "history",
    "features_computed_before_later_steps": "history",
    "penalty_computed_before_the_step": "history",
    "weight_with_a_graph_on_the_model": "history",
    "instance_check_of_ones_own": "__instancecheck__",
    "derivative_that_reads_a_setting": "scaled_backward",
    "function_allowed_in_the_graph": "allowed",
    "function_traced_loosely": "nonstrict_trace",
    "function_mode_around_later_steps": "HalvesTanh",
    "function_mode_around_first_steps": "HalvesTanh",
    "saved_tensors_rounded_around_the_step": "saved tensors",
    "flag_of_a_backend_read": "mkldnn",
    "operator_of_the_tensor_class_patched": "__pow__",
    "softmax_patched_behind_a_module": "softmax",
    "recursion_limit_read": "recursion",
    "node_hook_on_the_gradient_accumulator": "hook",
    "hook_on_the_gradient_accumulator_from_the_start": "hook",
    "attribute_of_an_empty_dictionary": "empty dictionary of class Tagged",
    "object_in_an_attribute_of_an_empty_dictionary": "empty dictionary of class Tagged",
    "missing_keys_answered_by_the_class": "empty dictionary of class WithDefaults",
    "consistency_with_a_ramp": "epochs['now'] is another one",
    "settings_copied_in_the_loss": "idioms.py",
    **dict.fromkeys(  # whatever the reason is called, it is told
        (
            "list_that_grows", "range_replaced", "batch_norm_with_cumulative_average", "queue_with_a_tensor_pointer",
            "replay_deque", "single_dispatch_registered_later", "tensor_method_patched",
            "strings_read", "forward_hook_inside_the_loss", "full_backward_hook_counts", "full_backward_hook_scales",
            "full_backward_pre_hook_scales", "full_backward_hook_added_later", "backward_hook_for_all_modules",
            "activation_hook_records", "activation_retains_its_gradient", "hook_on_several_gradients",
            "saved_tensors_packed", "saved_on_the_cpu", "iterator_exhausted", "error_in_the_backward",
            "interrupted_in_the_backward", "counter_of_the_module_level", "counter_on_a_function",
            "class_based_context_manager", "logs_in_a_trainer", "best_loss_kept", "printed_to_a_buffer",
            "warned_in_the_forward", "numpy_history", "numpy_confusion_matrix", "critic_frozen_for_the_generator",
            "zero_grad_patched", "context_variable", "lru_cached_and_never_cleared", "lru_cached_and_cleared",
            "iterator_of_weights", "generator_of_weights", "cycle_of_weights", "count_of_steps", "file_read",
            "json_file_read_by_path", "file_exists", "file_written", "clock", "clock_of_the_last_step", "date",
            "working_directory", "level_of_a_logger", "name_of_the_thread", "list_of_numbers", "branch_on_the_loss",
            "fixed_point_until_it_settles", "unique_labels",
            "cut_to_the_longest", "custom_autograd_function_that_counts",
            "checkpointed_forward_that_counts", "checkpointed_sequence",
            "embedding_with_sparse_gradients", "random_number", "random_branch",
            "random_choice_of_a_layer", "random_order_of_layers", "layers_dropped_at_random",
            "random_generator_of_ones_own", "random_seeded_in_the_loss", "random_seeded_between_steps",
            "random_drawn_between_steps", "numpy_random_number", "numpy_mixing_coefficient", "numpy_generator",
            "numpy_permutation_of_rows", "numpy_random_state", "probability_of_a_random_branch_changes",
            "update_inside_the_loss", "assignment_by_scipy", "evaluated_text", "thread_inside_the_loss",
            "frame_inspected", "collector_called", "model_copied_inside_the_loss", "dispatch_mode_in_the_loss",
            "anomaly_detection", "traced_module", "scheduler_number_read_by_the_loss",
            "optimizer_state_read_by_the_loss", "step_count_of_adam_read_by_the_loss",
            "shared_number_of_a_loader", "array_of_numbers", "bytes_that_change", "decimal_number",
            "conversions_of_an_object", "comparison_of_ones_own", "queue_of_weights", "method_found_by_dispatch",
            "subclass_of_tensor_with_a_factor", "subclass_of_tensor_comes_later", "attribute_lookup_of_ones_own",
            "operator_that_counts_in_a_buffer", "class_attribute_of_a_function_read_in_its_backward",
            "backward_of_a_function_replaced", "dispatch_mode_around_later_steps",
            "default_device_around_the_step", "number_of_threads_read", "matmul_precision_read", "seed_read",
            "torch_seeded_in_the_loss", "generator_of_torch_in_the_forward", "state_of_the_generator_kept_in_the_loss",
            "random_state_forked_in_the_loss", "builtin_function_patched", "module_found_by_name_in_the_loss",
            "global_read_by_the_table", "numpy_error_state_around", "lengths_as_a_list_of_numbers",
            "curvature_of_a_small_function", "function_that_writes_to_its_argument", "warnings_filtered_by_the_loss",
            "lock_held_in_the_loss", "getters_by_path", "method_called_by_name", "names_matched_as_files",
            "arguments_filtered_by_signature", "names_of_an_object_listed", "description_of_a_module_read",
            "hints_of_a_class_resolved", "heap_of_losses", "median_of_recent_numbers", "contexts_on_a_stack",
            "weak_proxy_of_a_config", "weak_values_that_die", "text_formatted_and_compared", "template_filled_in",
            "numbers_of_numpy_by_kind", "schedule_in_an_array", "schedule_in_an_array_as_it_is",
            "attribute_of_a_number_changes", "boxes_cut_and_pasted", "smoothing_by_a_schedule_of_a_dataclass",
        ),
        "",
    ),
}  # fmt: skip
"""Name -> words of the reason that must be told (any reason where there are none)."""


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names and classes; all of them for no name."""
    known = {*CASES, *(case.kind for case in CASES.values())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case or class is named {', '.join(unknown)}")
    return [case for case in CASES.values() if not names or case.name in names or case.kind in names]
