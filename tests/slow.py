"""Cases that plain `pytest` leaves to .ci/run (`pytest -m slow`), and those that .ci/run leaves to the test before a
release (`pytest -m long`): long ones, most of whose faults a quicker one finds.

Tables in one place, so that one sees at a glance what the quicker suites have of each part.
"""

from fnmatch import fnmatchcase

import pytest

SLOW = {
    "distributed/test_comm.py": (
        "test_every_mode_*[[]HSDP*",
        "test_every_mode_*[[]PP*",
    ),
    "distributed/test_compile.py": (
        "*[[]plain]",
        "*[[]FSDP, budget]",
        "*[[]ZeRO 1]",
        "*[[]TP, selective]",
        "*[[]FSDP, full]",
        "*[[]FSDP, every second matmul]",
    ),
    "distributed/test_compute_copies.py": (
        "*compiled]",
        "*[[]documents]",
        "*checkpointing*]",
        "*[[]one micro-batch]",
        "*z-loss]",
        "test_nothing_is_compiled_again_*",
        "*[[]Muon]",
        "*[[]every detail]",
        "*[[]tied]",
    ),
    "distributed/test_details.py": (
        "*[[]DDP 2]",
        "*[[]FSDP 4]",
        "*[[]CP 2*",
        "*compiled]",
        "*interleaved]",
        "*[[]owner 2]",
        "*[[]ZeRO 1]",
        "test_experts_and_frozen_layers",
    ),
    "distributed/test_context.py": (
        "test_documents_need_no_mask*[[]gather]",
        "test_four_ranks_keep*[[]all_to_all]",
    ),
    "distributed/test_exact.py": (
        "test_other_meshes_*",
        "test_a_run_that_moves_*",
        "test_a_rank_holds_*",
    ),
    "distributed/test_expert.py": (
        "test_experts_apart_do_not_change_the_run*",
        "test_in_the_parity_rows*[[]EP 2 x FSDP 2*",
    ),
    "distributed/test_fingerprint.py": (
        "*[[]owner 2]",
        "*[[]HSDP 2x2]",
        "*[[]DDP 2]",
        "*[[]EP 2]",
        "*[[]FSDP 2 x TP 2]",
    ),
    "distributed/test_float8.py": ("*",),
    "distributed/test_freezing.py": (
        "test_stops*[[]Muon]",
        "test_stops*[[]PP]",
    ),
    "distributed/test_grace.py": (
        "*[[]TP 2, eager]",
        "*[[]experts, EP 2, eager]",
        "*[[]owner 2, eager]",
        "test_a_run_goes_on_from_it_bit_for_bit",
        "*[[]PP 2, eager]",
        "test_a_save_that_is_under_way*",
        "test_threads_end_together*[[]1]",
    ),
    "distributed/test_late_results.py": (
        "test_spikes_that_are_skipped",
        "test_a_stop_is_learned_with_the_result",
        "test_a_save_in_the_middle*[[]skipped]",
        "test_a_result_that_differs_is_not_saved*",
        "test_ranks_that_differ*",
    ),
    "distributed/test_loss.py": ("test_sharded_vocabulary*[[]2-True]",),
    "distributed/test_moe.py": (
        "test_balance_and_biases*",
        "*[[]MoE auxiliary loss, FSDP 2, compiled]",
        "*[[]MoE bias, CP 2, eager]",
    ),
    "distributed/test_moments.py": (
        "*[[]HSDP 2x2]",
        "*[[]PP 2]",
        "test_a_run_that_moves_*",
        "test_moments_change_their_type*",
        "test_exact_runs*[[]FSDP 4, of uneven rows]",
    ),
    "distributed/test_moving_run.py": ("*[[]two ranks]",),
    "distributed/test_not_finite.py": (
        "test_of_a_moment_before_an_async_save",
        "test_of_a_weight_before_a_sync_save",
        "test_while_steps_are_skipped*[[]10-*",
        "test_while_steps_are_skipped*[[]20-*",
    ),
    "distributed/test_optimizer_export.py": (
        "*[[]PP 2]",
        "*[[]FSDP 2 x TP 2]",
        "test_the_next_learning_rate*",
        "*[[]owner 2, Muon]",
        "test_what_stays_by_pattern",
    ),
    "distributed/test_order_guard.py": ("test_it_sees_collectives_inside_compiled_blocks",),
    "distributed/test_owner_training.py": (
        "test_plain_torch_goes_on_from_the_exported_state[[]TP 2]",
        "test_rounded_parameters_do_the_same_on_any_number_of_ranks",
        "test_from_four_ranks*[[]Muon]",
        "test_checkpoints_hold_the_masters",
        "test_owners_and_row_shards*[[]saved0-loaded0]",
        "test_owners_and_row_shards*[[]saved2-loaded2]",
        "test_rounding_changes_nothing*",
        "test_freezing_and_unfreezing[[]Muon]",
    ),
    "distributed/test_parity.py": (
        "*[[]owner 2 x TP 2, Muon*",
        "*[[]CP 4, gather, eager]",
        "*[[]attention by flash2, TP 2]",
        "test_other_options[[]inf norm*",
        "test_other_options[[]always reshard, prefetch*",
        "test_the_same_in_float32",
        "*[[]ZeRO 2, HSDP 2x2, compiled]",
        "*[[]CP 2, all_to_all, compiled*",
        "*[[]CP 2 x DDP 2*",
        "*[[]PP 2 x DDP 2*",
        "*[[]PP 4*",
        "*[[]owner 2 x CP 2*",
        "*[[]PP 2 x FSDP 2, selective, compiled*",
        "test_other_options[[]tied embedding, compiled]",
        "*[[]TP 2, none, compiled*",
        "*[[]PP 2 x TP 2, selective*",
        "*[[]TP 2, selective, eager, accumulation 2]",
    ),
    "distributed/test_phases.py": (
        "*[[]compute*",
        "*[[]data---mesh.pp 2]",
    ),
    "distributed/test_pipeline.py": (
        "test_documents_and_validation[[]1f1b]",
        "test_documents_and_validation[[]gpipe]",
    ),
    "distributed/test_rank_pool.py": ("test_process_groups_that_are_gone_leave_no_threads",),
    "distributed/test_raw_pointers.py": (
        "*[[]TP 2]",
        "*[[]CP 2 gather*",
        "*[[]CP 2 all_to_all]",
    ),
    "distributed/test_replicas.py": (
        "test_an_interval_finds_it*",
        "*owner 2 x TP 2*",
        "test_a_run_ends_before_it_saves*",
        "*[[]CP 2 x DDP 2*",
        "test_of_two_copies*",
    ),
    "distributed/test_sampling.py": (
        "*[[]FSDP 2, two texts at once]",
        "*[[]owner 2]",
        "*[[]PP 2 x CP 2, interleaved]",
        "test_samples_run*[[]documents]",
        "*[[]PP 2, experts]",
        "*[[]tied-*",
        "*[[]Mixtral-FSDP 2 x TP 2]",
        "*of_the_validation[[]plain]",
        "test_samples_are*[[]documents]",
    ),
    "distributed/test_score.py": (
        "*[[]FSDP 2]",
        "*[[]CP 2*",
        "*[[]owner 2]",
        "*[[]TP 2]",
    ),
    "distributed/test_spikes.py": (
        "test_a_kill_after_going_back_changes_nothing",
        "test_a_stop_anywhere_changes_nothing[[]rewind]",
        "test_a_run_that_goes_back_too_often*",
    ),
    "distributed/test_stops.py": (
        "*[[]a save in the background]",
        "*[[]the first step*",
    ),
    "distributed/test_trace.py": (
        "*[[]PP 2 x CP 2]",
        "test_rows_travel*[[]full-2]",
    ),
    "distributed/test_trace_nonfinite.py": (
        "*-TP]",
        "*[[]compiled]",
    ),
    "distributed/test_validation.py": ("test_every_mesh_finds_the_same[[]FSDP x TP]",),
    "distributed/test_verdict.py": ("*[[]TP]",),
    "end_to_end/test_agreement.py": (
        "test_other_token_files_on_one_rank",
        "test_another_command_code_and_thread_count_on_one_rank",
        "test_each_rank_in_a_run_folder*",
    ),
    "end_to_end/test_bad_input.py": ("test_a_package_that_is_missing*",),
    "end_to_end/test_changed_files.py": (
        "*[[]at the next epoch]",
        "test_what_changes_nothing*",
    ),
    "end_to_end/test_compare.py": (
        "test_several_values*",
        "test_what_is_finished*",
        "test_the_report_is*",
        "test_a_config_against_its_copy*",
    ),
    "end_to_end/test_divergence.py": ("*",),
    "end_to_end/test_documented_commands.py": ("test_everything_that_is_documented_works",),
    "end_to_end/test_elastic.py": ("*",),
    "end_to_end/test_evaluation.py": ("*",),
    "end_to_end/test_examples.py": ("*",),
    "end_to_end/test_exports.py": ("test_what_is_to_be_exported*[[]async]",),
    "end_to_end/test_faults.py": (
        "test_nobody_waits_*",
        "test_a_stopped_rank_*",
        "test_rank_0_dies*Bus error*",
        "test_rank_0_dies*[[]9-*",
        "test_a_launch_that_could_say_nothing*",
        "test_a_rank_is_killed_under_torchrun[[]0]",
    ),
    "end_to_end/test_freezing.py": ("test_stops_before_at_and_after*",),
    "end_to_end/test_grace.py": ("*",),
    "end_to_end/test_install.py": ("*[[]plain]",),
    "end_to_end/test_other_bits.py": (
        "test_exact_reductions_have*",
        "test_a_checkpoint_of_before*",
    ),
    "end_to_end/test_page_in_a_browser.py": ("*",),
    "end_to_end/test_replay.py": ("*",),
    "end_to_end/test_restarts.py": ("*",),
    "end_to_end/test_resume.py": (
        "test_stops_leave_no_trace*",
        "test_the_command_that_began*",
    ),
    "end_to_end/test_run_folder.py": ("test_a_compiled_run_writes_no_warnings",),
    "end_to_end/test_same_curve.py": (
        "*[[]4 ranks*",
        "*[[]2 ranks, accumulation 2]",
    ),
    "end_to_end/test_sampling.py": ("test_text_is_streamed*",),
    "end_to_end/test_signals.py": (
        "test_one_process[[]2]",
        "test_while_torch_is_imported",
        "test_under_torchrun[[]one rank]",
    ),
    "end_to_end/test_skipped_steps.py": ("*",),
    "end_to_end/test_torchrun_report.py": (
        "test_a_rank_that_fails_alone*",
        "test_torchrun_ends_in_our_sentence[[]--checkpoint.load*",
    ),
    "torture/test_torture.py": ("*",),
    "unit/parallelisms/test_activation_checkpoint.py": ("test_works_with_the_default_backend",),
    "unit/trainer/test_agreement.py": ("test_ranks_that_agree_need_one_gather*",),
    "unit/parallelisms/test_attention_backend.py": (
        "test_one_graph_serves*",
        "test_a_run_says_its_kernel*",
    ),
    "unit/checkpoint/test_checkpoint_manager.py": (
        "test_kill_in_a_save*[[]manifest]",
        "test_kill_in_a_save*[[]rename]",
    ),
    "unit/parallelisms/test_compute_copies.py": ("test_a_limit_weighs*",),
    "unit/trainer/test_console.py": ("test_a_terminal_shows*",),
    "unit/parallelisms/test_exact_sums.py": ("*_vectors_of_any_size_*",),
    "unit/trainer/test_garbage.py": ("*",),
    "unit/trainer/test_numerics.py": ("test_what_the_keys_set*",),
    "unit/scripts/test_page.py": ("test_a_long_run*",),
    "unit/checkpoint/test_hf_export.py": ("test_memory_is_that_of_a_shard",),
    "unit/planning/test_least_recomputation.py": (
        "test_train_py_says_it*",
        "test_a_run_says_its_choice*",
    ),
    "unit/scripts/test_proof.py": (
        "test_a_flipped_bit_is_named*[[]0]",
        "test_a_flipped_bit_is_named*[[]29]",
        "test_random_steps_find_it",
        "test_an_exchanged_checkpoint_is_found",
        "test_a_run_that_computes_with_copies*[[]freed]",
    ),
    "unit/scripts/test_scripts.py": (
        "test_the_benchmark_measures_what_it_says",
        "test_keel_and_the_bare_loop_take_turns*",
        "test_what_cannot_be_compared*",
        "test_a_plan_of_7b*",
        "test_a_mesh_that_the_job*",
    ),
    "unit/trainer/test_sinks.py": ("test_a_service_*", "test_a_run_writes*"),
    "unit/house/test_slow.py": ("*",),
    "unit/data/test_text.py": ("test_the_standard_library_is_over_10_mb*",),
    "unit/parallelisms/test_torch_internals.py": ("test_listening_begins_and_ends*",),
}
"""By file, patterns of its cases (fnmatch: `[[]` is a bracket)."""

LONG = {
    # Meshes without compilation: `parity.py --random` draws them in each .ci/run, and one of each file's is still slow.
    "distributed/test_exact.py": (
        "*[[]FSDP [48]]",
        "*[[]FSDP 2, selective]",
        "*[[]FSDP 2, all bfloat16]",
        "*[[]HSDP 2x2, ZeRO 1]",
        "*[[]HSDP 4x2]",
        "*[[]HSDP [23]x[23]]",
        "*[[]PP 2 x *",
        "*[[]PP 2 interleaved]",
        "*[[]PP 2, bfloat16]",
        "*[[]experts, [DF]*",
    ),
    "distributed/test_expert.py": ("*[[]few]",),
    "distributed/test_freezing.py": (
        "*[[]frozen, HSDP 2x2, ZeRO 1, AdamW, compiled*",
        "*[[]frozen, *eager]",
        "test_stops*[[]owner x TP, masters]",
        "test_stops*[[]tied]",
        "test_stops*[[]FSDP]",
    ),
    "distributed/test_init.py": ("test_the_same_experts*",),
    "distributed/test_moe.py": ("test_other_meshes[[]*", "*[[]TP 2 x CP 2]"),
    "distributed/test_owner_training.py": (
        "test_from_four_ranks*[[]AdamW]",
        "test_owners_and_row_shards_load_each_others_checkpoints[[]saved[1345]*",
    ),
    "distributed/test_replicas.py": ("test_copies_stay_equal[[]EP*", "test_copies_stay_equal_in_bfloat16"),
    "distributed/test_sampling.py": (
        "test_samples_are_those_of_one_process[[][TC]P 2]",
        "test_samples_are_those_of_one_process[[]FSDP 2 x TP 2]",
        "test_samples_are_those_of_one_process[[]EP 2*",
        "test_samples_are_those_of_one_process[[]HSDP 2x2]",
        "test_samples_run*[[]TP 2]",
        # The graphs of the other meshes; each of the meshes and of the models of these texts has another case.
        "*[[]CP 2 x FSDP 2, documents]",
        "*[[]tied-FSDP 2 x TP 2]",
        "*[[]Mixtral-FSDP 2]",
        "*[[]Llama-FSDP 2 x TP 2]",
    ),
    # [experts, compiled] and [owner, compiled].
    "distributed/test_compute_copies.py": (
        "*[[]experts, compiled]",
        "test_a_run_moves_*",
        "*[[]compiled]",
        "*[[]frozen, compiled]",
        "*[[]tied, selective, compiled]",
        "*[[]experts]",
    ),
    # [TP, selective]; a ring has the values of a gather in test_context.py and test_parity.py.
    "distributed/test_compile.py": ("*[[]CP by *", "*[[]FSDP x TP]", "*[[]HSDP, bfloat16]"),
    # [1 process, compiled], [experts_and_frozen_layers], and the other meshes in eager mode.
    "distributed/test_details.py": ("*[[]FSDP 2 x TP 2, compiled]", "*[[]TP 2]"),
    # [two ranks]; test_exact.py moves through PP, HSDP and an owner partition, with the same bits.
    "distributed/test_moving_run.py": ("*[[]dense]", "*[[]experts]"),
    # [owner 2, Muon] exports AdamW's state as well, for the vectors.
    "distributed/test_optimizer_export.py": ("*[[]owner 2, AdamW]",),
    # Each of their axes has rows of its own, and each option another mesh.
    "distributed/test_parity.py": (
        "*[[]1 process, selective, compiled*",
        "*[[]FSDP 2 x TP 2, selective, compiled*",
        "*[[]CP 2 x FSDP 2, gather, compiled*",
        "*[[]memory limit, PP 2, compiled]",
        "*[[]CP 2 x TP 2*",
        "*[[]DDP 2 x TP 2*",
        "*[[]PP 2 x CP 2 x FSDP 2*",
        "*[[]HSDP 2x2, none, compiled*",
        "test_other_options[[]always reshard, PP*",
        "test_other_options[[]tied embedding, FSDP*",
    ),
    # Going back skips as well: [rewind], and test_a_kill_after_going_back_changes_nothing.
    "distributed/test_spikes.py": ("test_every_mesh_*", "test_a_stop_anywhere_changes_nothing[[]skip]"),
    # [PP 2 x CP 2]
    "distributed/test_trace.py": ("*[[]FSDP 2 x TP 2]",),
    # Many runs for one probability; the others see one comparison each.
    "end_to_end/test_compare.py": ("test_equal_configs_that_never*",),
    # [exact]
    "end_to_end/test_replay.py": ("test_another_mesh[[]fast*",),
    # What gloo does, whatever Keel does.
    "unit/parallelisms/test_connections.py": ("test_gloo_connects_*",),
    # A like case of the same file, or .ci/run itself, finds the same faults.
    "distributed/test_stops.py": (
        "*[[]the third of*",
        "*[[]a save that holds up training]",
    ),
    # A like case of the same file, or .ci/run itself, finds the same faults.
    "distributed/test_late_results.py": (
        "test_a_save_in_the_middle*[[]finite]",
        "test_steps_that_are_not_finite",
    ),
    # A like case of the same file, or .ci/run itself, finds the same faults.
    "end_to_end/test_faults.py": ("test_nobody_waits_for_a_dead_rank*",),
    "torture/test_torture.py": (
        "test_resume[[]FSDP 2, none, compiled]",
        # .ci/run soaks for minutes, and a third of the launches of a soak go through torchrun.
        "test_soak",
        "test_kill[[]*",
        # test_a_resume_that_forgets_something_is_seen
        "test_a_soak_sees_*",
        # unit/scripts/test_proof.py flips bits and replays, in one process.
        "test_flips",
        # Launches on these meshes go on in distributed/test_moving_run.py and test_owner_training.py, and in a soak.
        "test_resume[[]CP 2, selective, eager]",
        "test_resume[[]owner 2, full, eager]",
        "test_resume[[]TP 2, none, eager]",
        "test_resume[[]experts, FSDP 2, none, eager]",
        "test_resume[[]FSDP 2, selective, eager]",
    ),
}
"""As SLOW, each with what has found most of its faults before."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the collected cases that the tables name; a long one is not slow as well."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        file, _, _ = item.nodeid.partition("::")
        cases.setdefault(file.removeprefix("tests/"), []).append(item)
    for marker, table in (("long", LONG), ("slow", SLOW)):
        for file, patterns in table.items():
            for item in cases.get(file, []):
                if any(fnmatchcase(item.name, pattern) for pattern in patterns) and not item.get_closest_marker("long"):
                    item.add_marker(marker)
