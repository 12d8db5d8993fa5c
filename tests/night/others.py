"""Cases of benchmarks, memory and packaging that always run. Those of the night start Python and
import everything again, or compile: by day others show a part of it in a process that has done so.
"""

BENCHMARKS = "tests/benchmarks"

ALWAYS: dict[str, tuple[str, ...]] = {
    "tests/benchmarks/test_compiling_ahead.py::test_unfinished_compilations_are_left_for_later": (),
    # By day each family's layers are compared in one process, and FSDP2's casts with layers that share keys.
    "tests/frameworks/test_fully_shard.py::"
    "test_residual_streams_and_states_survive_two_ranks_at_every_level": (),
    "tests/convert/checkpoints/test_reading.py::"
    "test_loading_half_a_gigabyte_needs_little_more_than_the_parameters": (),
    # A level keeps and plans the same whatever the adapters, which are counted at one level each.
    "tests/test_live_bytes.py::test_a_step_keeps_what_its_level_promises_and_needs_what_is_planned": (
        *(f"full, dense-{level}" for level in ("all", "mlp", "lean", "tiled", "checkpoint", "offload")),
        "full, experts-lean",
        "full, latent attention-lean",
        "full, gated attention-all",
        "full, gated delta rule-tiled",
        "full, selective scan-lean",
        "LoRA, dense-lean",
        "LoRA of experts-lean",
        "DoRA-lean",
        "QLoRA-checkpoint",
        "LoRA on torchao's 8 bits-lean",
    ),
    "tests/test_live_bytes.py::test_however_a_step_ends_it_gives_everything_back_at_once": (
        "full, experts-lean",
        "LoRA, dense-offload",
    ),
    "tests/test_live_bytes_of_trainers.py::test_a_step_on_images_keeps_what_its_level_promises": (
        *("checkpoint", "lean"),
    ),
    "tests/test_live_bytes_of_trainers.py::test_a_trainers_step_keeps_what_its_level_promises": (
        "dpo-checkpoint",
        "trainer-lean",
    ),
    f"{BENCHMARKS}/test_vision.py::test_every_vision_language_family_accepts_the_images": (
        *("aya_vision", "gemma4", "lfm2_vl", "mllama", "qwen2_5_vl"),
    ),
    f"{BENCHMARKS}/test_lengths.py::"
    "test_a_case_runs_in_its_own_command_and_a_peer_is_checked_without_ours": (),
    f"{BENCHMARKS}/test_parallel.py::test_two_processes_measure_a_model_and_report_what_is_missing": (),
    f"{BENCHMARKS}/test_compiling_ahead.py::test_jobs_run_in_processes_that_end_and_report_failures": (),
    f"{BENCHMARKS}/test_lengths.py::"
    "test_generation_runs_in_its_own_process_and_a_peer_is_checked_without_ours": (),
    f"{BENCHMARKS}/test_training.py::test_a_peer_is_measured_again_in_a_process_without_ours": (),
    # Runs compositions until the smallest that fails is found.
    f"{BENCHMARKS}/test_certify.py::test_a_wrong_loss_is_found_and_reduced_to_the_simplest_composition": (),
    f"{BENCHMARKS}/test_certify.py::test_compositions_in_one_process_hold": ("0", "2"),
    # By day the sharded runs of tests/liger_models/parallel are compared, and compositions in one process.
    f"{BENCHMARKS}/test_certify.py::test_compositions_on_two_processes_hold": (),
    # By day test_compilation.py compiles for one GPU, and the limits are tested with made-up launches.
    f"{BENCHMARKS}/test_devices.py::test_kernels_fit_four_gpus_at_real_sizes": (),
    f"{BENCHMARKS}/test_commands.py::test_liger_models_bench_runs_from_another_folder": (),
    f"{BENCHMARKS}/test_training.py::test_the_cases_of_a_page_are_updated_with_ratios_and_plot": (),
    "tests/test_platforms.py::test_everything_imports_and_checkpoints_are_written_without_unix_modules": (),
    # By day the wheel is built and its files are compared.
    "tests/test_package.py::test_an_installed_wheel_is_found_and_runs_outside_the_repository": (),
}
