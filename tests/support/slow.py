"""Which tests `make test` leaves to `make test-all`: the one place where a test is marked `slow`."""

from fnmatch import fnmatch

import pytest

FIXTURES = {"three_ranks", "four_ranks", "postgres", "own_postgres", "browser"}
DATABASES = {"postgresql"}  # as a parameter

# Folders, files and tests below `tests`, in the form of fnmatch.
PATTERNS = (
    # Processes that are killed, stopped, cut off or left waiting
    "server/hostile/*",
    "server/work/test_worker.py*",
    "server/test_storing.py::test_a_disk_that_is_full*",
    "server/test_serve.py*",
    "server/test_events.py::test_every_client*",
    "server/test_events.py::test_a_subscriber*",
    "runtime/test_swaps.py::test_random_schedules*",
    # The whole at once: services, solvers and trainings as a user starts them
    "deploy/*",
    "e2e/*",
    "benchmarks/*",
    "runtime/test_follow.py::test_two_ranks_train_by_a_search*",
    "cli/test_search_commands.py::test_ctrl_c_while_an_engine_computes*",
    "runtime/test_training.py::test_the_script_in_the_docs_runs*",
    "runtime/test_training.py::test_both_examples_print_the_same_losses*",
    "runtime/test_training.py::test_packed_documents_have_the_losses_of_a_plain_run*",
    "cli/test_cost_commands.py::test_a_model_is_measured_under_torchrun*",
    # Other projects' programs, and their readers
    "runtime/test_torch_pipelining.py*",
    "runtime/test_torch_refusals.py*",
    "runtime/test_megatron.py*",
    "runtime/test_megatron_steps.py*",
    "runtime/test_compiled_stages.py::test_*compiled*",
    # Pages and examples of the docs
    "docs/test_blocks.py*",
    # What several new processes do
    "cache/test_cache.py::test_several_processes_create_one_cache*",
    "cache/test_cache.py::test_what_a_killed_process_has_added*",
    "core/test_jit.py::test_what_is_compiled_is_kept_until_a_function_that_it_calls_changes*",
    # Searches that take many seconds
    "solver/test_partitions.py::test_layers_count_only_where_placements_are_searched*",
    "solver/test_placement_search.py::test_rules_are_searched_side_by_side_and_lead_further_than_a_first_look*",
    "solver/test_placement_search.py::test_more_chunks_beat_what_one_chunk_can_ever_reach*",
    "solver/test_systems_variants.py::test_nor_on_the_stages_that_it_needs*",
    "solver/test_portfolio.py::test_cancelled_while_engines_compute_nothing_is_left_but_the_best*",
    "solver/test_portfolio.py::test_a_huge_problem_ends_in_time*",
    "solver/test_portfolio.py::test_one_thread_and_one_seed_find_the_same_however_busy_the_machine*",
    "solver/test_all_bounds.py::test_nothing_is_shorter_than_the_best_of_all*",
    "solver/test_all_bounds.py::test_what_enumeration_leaves_out_is_no_better*",
    "solver/test_all_bounds.py::test_a_bound_that_is_too_high_by_2_percent_is_seen*",
    "solver/test_first.py::test_memory_does_not_grow*",
)
# These run in `make test`, too: a page in a browser at least once.
KEPT = ("core/test_show.py::test_the_bars_are_the_timeline*",)


def is_slow(item: pytest.Item) -> bool:
    """Whether only `make test-all` runs this test."""
    name = item.nodeid.removeprefix("tests/")
    if any(fnmatch(name, pattern) for pattern in KEPT):
        return False
    fixtures = set(getattr(item, "fixturenames", ()))
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (
        bool(fixtures & FIXTURES)
        or any(isinstance(value, str) and value in DATABASES | FIXTURES for value in parameters)
        or any(fnmatch(name, pattern) for pattern in PATTERNS)
    )
